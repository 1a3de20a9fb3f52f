// Suites whose name begins with World also run under mpirun (tests/CMakeLists.txt); without it they are a world of one.
#include "dist/sharded_optimizer.h"

#include <chrono>
#include <thread>

#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

Communicator& world() {
  return Communicator::world();
}

TEST(WorldCommunicator, GathersInTheOrderOfRanks) {
  const std::vector<int> ranks = world().all_gather(world().rank());
  ASSERT_EQ(static_cast<int>(ranks.size()), world().size());
  for (int rank = 0; rank < world().size(); ++rank) EXPECT_EQ(ranks[rank], rank);
  // Texts of any length, none among them.
  const std::vector<std::string> texts =
      world().all_gather(std::string(static_cast<size_t>(world().rank()) * 70000, 'x'));
  for (int rank = 0; rank < world().size(); ++rank) EXPECT_EQ(texts[rank].size(), rank * 70000u);
  EXPECT_EQ(world().from_first(fmt::format("from {}", world().rank())), "from 0");
  EXPECT_GE(world().cores(), 1);
  EXPECT_LT(world().local_rank(), world().local_size());
}

TEST(WorldCommunicator, AnErrorOfOneRankIsThrownOnAll) {
  const int last = world().size() - 1;
  world().agree([] {});
  expect_error([&] { world().agree([&] { require(world().rank() != last, "the disk of {} is full", last); }); },
               {fmt::format("the disk of {} is full", last), last > 0 ? fmt::format("rank {} (", last) : "the disk"});
  EXPECT_EQ(world().all_gather(1).size(), static_cast<size_t>(world().size()));  // it still works
}

TEST(WorldCommunicator, WaitsForARankThatWorksAlone) {
  world().set_timeout(1);
  if (world().leads() && world().size() > 1) {
    const Communicator::SoloWork alone(world());
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  }
  EXPECT_EQ(world().all_gather(1).size(), static_cast<size_t>(world().size()));
  world().set_timeout(600);
}

// Parameters of odd sizes, whose value, gradient and moments are a function of where they are.
struct Model {
  explicit Model(const std::vector<int64_t>& sizes) {
    for (const int64_t size : sizes) {
      const Tensor value = Tensor::empty({size}, DType::f32);
      for (int64_t i = 0; i < size; ++i) value.data<float>()[i] = number(parameters.size(), i);
      parameters.emplace_back(value, true);
    }
  }
  static float number(size_t parameter, int64_t i) { return static_cast<float>(100 * parameter + i % 97 + 1); }

  // On this tape every parameter has the gradient (rank + 1) · number, in two contributions.
  void run(Tape& tape, int rank, bool backward = true) {
    Variable loss(tensor_of({0}, {1}), false);
    for (size_t i = 0; i < parameters.size(); ++i) {
      for (int use = 0; use < 2; ++use) {
        const Variable parameter = parameters[i];
        loss = tape.record(tensor_of({0}, {1}), {loss, parameter}, [=](const Tensor& dy) {
          if (loss.needs_gradient()) loss.add_gradient(to_dtype(dy, DType::f32));
          const Tensor gradient = parameter.new_gradient();
          for (int64_t k = 0; k < gradient.elements(); ++k)
            gradient.data<float>()[k] = 0.5f * static_cast<float>(rank + 1) * number(i, k);
          parameter.add_gradient(gradient);
        });
      }
    }
    if (backward) tape.backward(loss);
  }

  std::vector<Variable> parameters;
};

// A cut through a parameter, parameters that share a bucket, one bucket for all.
const std::vector<int64_t> kBuckets = {64, 128, 1000, 4096, 1 << 20};
const std::vector<int64_t> kSizes = {300, 1, 64, 2000, 63, 65, 5};

TEST(WorldShardedOptimizer, SumsTheGradientsOfAllRanks) {
  const int ranks = world().size();
  const double all = ranks * (ranks + 1) / 2.0;  // 1 + … + n
  for (const DType sent : {DType::f32, DType::bf16}) {
    for (const int64_t bucket : kBuckets) {
      Model model(kSizes);
      ShardedOptimizer shards(world(), model.parameters, sent, bucket);
      EXPECT_EQ(shards.buckets() == 1, bucket >= 4096) << bucket;
      for (int step = 0; step < 2; ++step) {
        shards.begin_step();
        shards.send();
        Tape tape;
        model.run(tape, world().rank());
        shards.finish();
        // An update that copies the sums to the parameters; AdamW itself is not tested here.
        for (const AdamWTensors& own : shards.to_update()) copy(own.parameter, own.gradient);
        shards.gather_parameters();
        shards.end_step();
        for (const Variable& parameter : model.parameters) parameter.clear_gradient();
        for (size_t i = 0; i < kSizes.size(); ++i)
          for (int64_t k = 0; k < kSizes[i]; ++k)
            ASSERT_NEAR(model.parameters[i].value().data<float>()[k], all * Model::number(i, k),
                        sent == DType::bf16 ? 0.01 * all * Model::number(i, k) : 0)
                << "bucket " << bucket << " parameter " << i << " element " << k;
      }
      const Tensor squares = Tensor::zeros({1}, DType::f64);
      *squares.data<double>() = world().rank() + 1;
      shards.add_squares(squares);
      EXPECT_EQ(*squares.data<double>(), all);
    }
  }
}

TEST(WorldShardedOptimizer, KeepValuesAndMoments) {
  for (const int64_t bucket : kBuckets) {
    Model model(kSizes);
    ShardedOptimizer shards(world(), model.parameters, DType::f32, bucket);
    for (size_t i = 0; i < kSizes.size(); ++i) {
      EXPECT_EQ(model.parameters[i].value().data<float>()[0], Model::number(i, 0));
      const Tensor first = to_dtype(model.parameters[i].value(), DType::f32), second = to_dtype(first, DType::f32);
      fill(second, static_cast<float>(i));
      shards.set_moments(i, first, second);
    }
    const ShardedOptimizer::Moments moments = shards.moments();
    if (!world().leads()) {
      EXPECT_TRUE(moments.first.empty());
      continue;
    }
    for (size_t i = 0; i < kSizes.size(); ++i) {
      EXPECT_EQ(to_doubles(moments.first[i]), to_doubles(model.parameters[i].value())) << bucket;
      EXPECT_EQ(to_doubles(moments.second[i]), std::vector<double>(kSizes[i], i)) << bucket;
    }
  }
}

TEST(WorldShardedOptimizer, ARankThatFailsMakesTheSumNotANumber) {
  Model model({100, 200});
  ShardedOptimizer shards(world(), model.parameters, DType::f32, 64);
  shards.begin_step();
  shards.send();
  Tape tape;
  const bool fails = world().rank() == world().size() - 1;
  model.run(tape, world().rank(), !fails);
  if (fails) shards.fail();
  shards.finish();
  for (const Tensor& sum : shards.sums())
    EXPECT_TRUE(std::isnan(sum.data<float>()[0]) || sum.data<float>()[0] == 0);  // what pads a bucket is zero
  EXPECT_TRUE(std::isnan(shards.sums().front().data<float>()[0]));
}

// The order in which buckets are sent is that of the backward pass, and a parameter that nothing uses has zero.
TEST(ShardedOptimizer, CountsAnUnusedParameterAsZero) {
  Model model({100, 200});
  model.parameters.insert(model.parameters.begin() + 1, Variable(tensor_of({7, 8, 9}, {3}), true));
  ShardedOptimizer shards(Communicator::alone(), model.parameters, DType::f32, 64);
  for (int step = 0; step < 2; ++step) {
    shards.begin_step();
    shards.send();
    Tape tape;
    const Variable unused = model.parameters[1];
    std::vector<Variable> used{model.parameters[0], model.parameters[2]};
    std::swap(model.parameters, used);
    model.run(tape, 0);
    std::swap(model.parameters, used);
    shards.finish();
    EXPECT_EQ(to_doubles(shards.gradient(1)), (std::vector<double>{0, 0, 0}));
    for (const Variable& parameter : model.parameters) parameter.clear_gradient();
  }
}

TEST(Communicator, DetectsItsLauncher) {
  EXPECT_GE(launched_processes(), 1);
  EXPECT_EQ(Communicator::alone().size(), 1);
  EXPECT_TRUE(Communicator::alone().leads());
  expect_error([] { Communicator::alone().abort("the disk is full"); }, {"the disk is full"});
}

}  // namespace
}  // namespace furious
