"""A server with the shapes of docs/serving.md and no model: for looking at the page without one.

    python3 tests/serve_interop/mock_server.py [PORT]
"""
import json
import pathlib
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = pathlib.Path(__file__).resolve().parents[2] / "src/serve/page.html"
STATES = {}
SEEN = []  # lists of messages that were read


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, value, status=200, kind="application/json"):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def error(self, status, message):
        self.send({"error": {"message": message, "type": "invalid_request_error", "code": None}}, status)

    def do_GET(self):
        if self.path == "/":
            return self.send(PAGE.read_bytes(), kind="text/html; charset=utf-8")
        if self.path == "/v1/models":
            return self.send({"object": "list", "data": [{
                "id": "mock", "object": "model",
                "furious": {"state_bytes": 87_000_000, "kv_bytes_per_token": 163_840, "chat_template": "chatml", "slots": 8}}]})
        if self.path == "/v1/states":
            return self.send({"object": "list", "data": list(STATES.values())})
        self.error(404, "unknown path")

    def do_DELETE(self):
        name = self.path.rsplit("/", 1)[1]
        if STATES.pop(name, None) is None:
            return self.error(404, f'unknown state "{name}"')
        self.send({"name": name, "deleted": True})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/states":
            if body["name"] in STATES:
                return self.error(409, f'a state "{body["name"]}" exists already')
            tokens = len(body.get("text", "x" * 400)) // 4
            STATES[body["name"]] = {"name": body["name"], "tokens": tokens, "bytes": 87_000_000, "exact": True,
                                    "on_disk": True, "created": int(time.time())}
            return self.send(STATES[body["name"]])
        messages = [(m["role"], m["content"]) for m in body["messages"]]
        tokens = lambda some: sum(len(content) // 4 + 4 for _, content in some)
        base = STATES[body["state"]]["tokens"] if body.get("state") else 0
        cached = max([tokens(old) for old in SEEN if messages[:len(old)] == old], default=0) + base
        answer = f"You said: {messages[-1][1]}. " + " ".join(f"word{i}" for i in range(min(30, body["max_tokens"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        said = ""
        try:
            for word in answer.split(" "):
                piece = word if not said else " " + word
                said += piece
                self.event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
                time.sleep(0.03)
            self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            count = len(answer.split(" "))
            prompt = tokens(messages) + base
            self.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": count,
                                                 "total_tokens": prompt + count,
                                                 "prompt_tokens_details": {"cached_tokens": cached}}})
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
        SEEN.append(messages + [("assistant", said)])
        SEEN.append(messages)

    def event(self, value):
        value = {"id": "chatcmpl-mock", "object": "chat.completion.chunk", "model": "mock", **value}
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8081
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
