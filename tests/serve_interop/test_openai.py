"""The openai package against a running server (FURIOUS_URL): sync, async, streaming, errors, states."""
import asyncio
import json
import os
import urllib.request

import openai
import pytest

URL = os.environ.get("FURIOUS_URL", "http://127.0.0.1:8080/")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where did the snake sit?"}]


@pytest.fixture
def client():
    with openai.OpenAI(base_url=URL + "v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def chat(client, model, messages=MESSAGES, **more):
    return client.chat.completions.create(model=model, messages=messages, max_tokens=16, seed=7, **more)


def test_models(client, model):
    entry = client.models.retrieve(model)
    assert entry.id == model and entry.object == "model"
    sizes = client.models.list().data[0].furious
    assert sizes["state_bytes"] > 0 and sizes["kv_bytes_per_token"] > 0


def test_chat(client, model):
    answer = chat(client, model)
    assert answer.object == "chat.completion" and len(answer.choices) == 1
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert 0 < answer.usage.completion_tokens <= 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert chat(client, model).choices[0].message.content == choice.message.content  # cold or from the store


def test_streaming_gives_the_same_text(client, model):
    whole = chat(client, model).choices[0].message.content
    pieces, usage, reasons = [], None, []
    for chunk in chat(client, model, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reasons.append(choice.finish_reason)
        usage = chunk.usage or usage
    assert "".join(pieces) == whole
    assert [r for r in reasons if r] in (["stop"], ["length"])
    assert usage.prompt_tokens_details.cached_tokens > 0


def test_a_conversation_reads_only_what_is_new(client, model):
    messages = MESSAGES[:1] + [{"role": "user", "content": "Tell me about " + os.urandom(8).hex()}]
    first = chat(client, model, messages)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And?"}]
    second = chat(client, model, messages)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_several_choices_and_logprobs(client, model):
    answer = chat(client, model, n=3, temperature=1, logprobs=True, top_logprobs=2)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        for token in choice.logprobs.content:
            assert token.logprob <= 0 and len(token.top_logprobs) == 2


def test_completions(client, model):
    answer = client.completions.create(model=model, prompt="The snake sat", max_tokens=8, temperature=0)
    assert answer.object == "text_completion" and answer.choices[0].text
    again = client.completions.create(model=model, prompt="The snake sat", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in again if chunk.choices) == answer.choices[0].text


def test_stop(client, model):
    whole = client.completions.create(model=model, prompt="The snake sat", max_tokens=12, temperature=0).choices[0].text
    stop = whole[3:5]
    answer = client.completions.create(model=model, prompt="The snake sat", max_tokens=12, temperature=0, stop=[stop])
    assert answer.choices[0].text == whole[:whole.index(stop)] and answer.choices[0].finish_reason == "stop"


def test_async_at_once(model):
    async def run():
        async with openai.AsyncOpenAI(base_url=URL + "v1", api_key="none", timeout=60) as client:
            async def one(i):
                stream = await client.chat.completions.create(
                    model=model, stream=True, max_tokens=12, seed=i,
                    messages=[{"role": "user", "content": f"Question {i}"}])
                return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
            together = await asyncio.gather(*[one(i) for i in range(6)])
            return together, [await one(i) for i in range(6)]
    together, alone = asyncio.run(run())
    assert all(together) and together == alone


def test_errors_are_the_packages_own(client, model):
    with pytest.raises(openai.NotFoundError):
        chat(client, "no-such-model")
    with pytest.raises(openai.BadRequestError):
        chat(client, model, temperature=-1)
    with pytest.raises(openai.BadRequestError):
        chat(client, model, messages=[])
    with pytest.raises(openai.NotFoundError):
        chat(client, model, extra_body={"state": "no-such-state"})


def test_states(client, model):
    name = "openai-" + os.urandom(4).hex()

    def call(method, path, body=None, raw=False):
        data = json.dumps(body).encode() if body is not None and not raw else body
        request = urllib.request.Request(URL + path, data=data, method=method,
                                         headers={"Content-Type": "application/octet-stream" if raw else "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read()

    entry = json.loads(call("POST", "v1/states", {"name": name, "text": "The fox knows the road. " * 20}))
    assert entry["name"] == name and entry["tokens"] > 400
    answer = chat(client, model, extra_body={"state": name})
    assert answer.usage.prompt_tokens_details.cached_tokens >= entry["tokens"]
    call("POST", "v1/states", {"name": name + ".copy", "fork": name})
    data = call("GET", f"v1/states/{name}/data")
    call("PUT", f"v1/states/{name}.back/data", data, raw=True)
    texts = {chat(client, model, extra_body={"state": s}).choices[0].message.content
             for s in (name, name + ".copy", name + ".back")}
    assert texts == {answer.choices[0].message.content}
    call("POST", "v1/states", {"name": name + ".end", "response": answer.id})
    names = [s["name"] for s in json.loads(call("GET", "v1/states"))["data"]]
    for one in (name, name + ".copy", name + ".back", name + ".end"):
        assert one in names
        call("DELETE", f"v1/states/{one}")
    assert name not in [s["name"] for s in json.loads(call("GET", "v1/states"))["data"]]
