// `furious serve`, by running the binary.
#include <sys/wait.h>

#include <csignal>
#include <filesystem>

#include "cli/run.h"
#include "data/tokenizer.h"
#include "model/checkpoint.h"
#include "serve/client.h"
#include "support.h"
#include "temporary_directory.h"

namespace furious {
namespace {

using namespace furious::testing;
using nlohmann::json;

class ServeCommand : public ::testing::Test {
 protected:
  ServeCommand() {
    std::filesystem::create_directories(folder / "model");
    Random random(1);
    const auto weights = [&](const std::string&, const Tensor& out) {
      copy(out, random.normal_tensor(out.shape(), 0.3));
    };
    save_model(folder / "model", LanguageModel(model_config("2mamba", "tiny", 258), weights));
    save_tokenizer(folder / "model", *load_tokenizer("byte"));
  }
  // Serves on a free port, calls `use(port)`, and sends the signal; the status of waitpid.
  int serve(int signal, const std::function<void(uint16_t)>& use) {
    const uint16_t port = free_port();
    const std::vector<std::string> arguments{"serve",       (folder / "model").string(),
                                             "--port",      std::to_string(port),
                                             "--state-dir", (folder / "states").string(),
                                             "--threads",   "1",
                                             "--slots",     "2"};
    return run_and_signal(arguments, signal, [&] {
      if (!Client(port).connected()) return false;
      use(port);
      return true;
    });
  }
  static uint16_t free_port() {
    const int probe = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    require(::bind(probe, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                ::getsockname(probe, reinterpret_cast<sockaddr*>(&address), &size) == 0,
            "no free port");
    ::close(probe);
    return ntohs(address.sin_port);
  }

  TemporaryDirectory folder;
};

TEST_F(ServeCommand, DrainsOnSigtermAndKeepsStatesAlsoAfterSigkill) {
  const json text{{"name", "document"}, {"text", std::string(300, 'x')}};
  const json question{{"state", "document"}, {"prompt", "?"}, {"max_tokens", 12}, {"temperature", 0}};
  std::string first, second;
  int status = serve(SIGTERM, [&](uint16_t port) {
    EXPECT_EQ(Client(port).post("/v1/states", text).status, 200);
    first = Client(port).post("/v1/completions", question).json()["choices"][0]["text"];
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  for (const int signal : {SIGKILL, SIGINT}) {
    status = serve(signal, [&](uint16_t port) {
      const json answer = Client(port).post("/v1/completions", question).json();
      second = answer["choices"][0]["text"];
      EXPECT_GE(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 301);
    });
    EXPECT_EQ(second, first);
    EXPECT_EQ(WIFSIGNALED(status), signal == SIGKILL) << status;
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(ServeCommand, RefusesWhatItCannotServe) {
  expect_run("serve nowhere", 1, {"nowhere"});
  expect_run("serve " + (folder / "model").string() + " --slots none", 2, {"--slots", "auto"});
  expect_run("serve " + (folder / "model").string() + " --state-bytes much", 2, {"not a number of bytes"});
  expect_run("serve " + (folder / "model").string() + " --host somewhere --port 0", 1, {"not an address"});
  expect_run("serve " + (folder / "model").string() + " --chat-template chatmi", 1, {"chatml"});
}

}  // namespace
}  // namespace furious
