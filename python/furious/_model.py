"""Models, sessions and batches of sequences of the library."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import threading
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from . import _furious
from ._furious import Error, Text

Ids = Any  # a list of integers, or a one-dimensional array of torch or numpy


def _ids(ids: Ids, what: str = "ids") -> np.ndarray:
    if hasattr(ids, "detach"):  # torch
        ids = ids.detach().cpu()
    array = np.asarray(ids)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise Error(f"{what}: got {array.dtype} of shape {list(array.shape)}, expected a list of token ids")
    if array.min() < 0 or array.max() > 2**31 - 1:
        raise Error(f"{what}: {array.min() if array.min() < 0 else array.max()} is no token id; use those of encode()")
    return np.ascontiguousarray(array, np.int32)


def _sampling(temperature: float = 0.8, top_k: int = 0, top_p: float = 0.95, min_p: float = 0.0,
              repetition_penalty: float = 1.0, frequency_penalty: float = 0.0, presence_penalty: float = 0.0,
              seed: int = 123, logit_bias: dict[int, float] | None = None,
              log_probabilities: int = -1) -> _furious.Sampling:
    return _furious.sampling(temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty,
                             seed, logit_bias or {}, log_probabilities)


@dataclasses.dataclass
class SequenceState:
    """What a sequence remembers, as plain arrays; docs/formats.md describes them."""

    model: str  #: fingerprint of the model; "": not compared
    tokens: int  #: read and written
    pending: int  #: of them not in the arrays "state" yet, but in the windows
    recent: np.ndarray  #: the last tokens, int32, at most 256
    arrays: dict[str, np.ndarray]  #: float32: layers.N.state, .k, .v, .log_decay, .conv as far as they exist; logits

    def _dict(self) -> dict[str, Any]:
        return {"model": self.model, "tokens": int(self.tokens), "pending": int(self.pending),
                "recent": _ids(self.recent, "recent"),
                "arrays": {name: np.ascontiguousarray(array, np.float32) for name, array in self.arrays.items()}}


class Model:
    """Weights and tokenizer of a checkpoint. Any number of sessions and threads may use it at once."""

    def __init__(self, model: _furious.Model):
        self._model = model

    @staticmethod
    def load(path: str | os.PathLike[str], *, arch: str = "", tokenizer: str = "", device: str = "auto",
             dtype: str = "", heads: int = 0, threads: int = 0, bos: bool = False) -> Model:
        """Loads a checkpoint directory, a training run (its newest checkpoint) or a .safetensors file.

        Args:
            device: "cpu", "cuda", "cuda:1", or "auto": a GPU if there is one.
            dtype: "f32" or "bf16", in which products are computed; "": bf16 on a GPU, f32 on the CPU.
            tokenizer: "byte", a SentencePiece model, a tokenizer.json or a folder with one of them; "": the one of the
                checkpoint.
            arch, heads: for weights without a config.json.
            threads: of the CPU for each session; 0: all cores.
            bos: texts begin with bos.
        """
        return Model(_furious.Model.load(os.fspath(path), arch, tokenizer, device, dtype, heads, threads, bos))

    @property
    def arch(self) -> str:
        return self._model.arch

    @property
    def parameters(self) -> int:
        return self._model.parameters

    @property
    def vocabulary(self) -> int:
        return self._model.vocabulary

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the checkpoint."""
        return json.loads(self._model.config)

    @property
    def bos(self) -> int:
        """-1: the tokenizer has none."""
        return self._model.bos

    @property
    def eos(self) -> int:
        return self._model.eos

    @property
    def fingerprint(self) -> str:
        """Equal for models of equal configuration, weights and tokenizer."""
        return self._model.fingerprint()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._model.encode(text)

    def prompt(self, text: str) -> list[int]:
        """Token ids of the first text of a sequence: the mark before a document, if the model has one, and encode()."""
        return self._model.prompt(text)

    def decode(self, ids: Ids) -> str:
        return self._model.decode(_ids(ids))

    def logits(self, ids: Ids) -> Any:
        """Logits of a full pass: float32 ``[length, vocabulary]``, row i after ids[0] to ids[i].

        An array of numpy, or a tensor of torch where ``ids`` is one.
        """
        values = self._model.logits(_ids(ids))
        if hasattr(ids, "detach"):
            import torch

            return torch.from_numpy(values).to(ids.device)
        return values

    def score(self, text: str | Ids) -> Any:
        """Log-probabilities of the tokens of a text, or of ids.

        For a text: a list of (id, log P) of its tokens after the mark before a document. For ids: float64
        ``[length - 1]``, entry i is log P(ids[i + 1] | ids[0] to ids[i]).
        """
        if isinstance(text, str):
            return self._model.text_scores(text)
        return self._model.scores(_ids(text))

    def generate(self, prompt: str, tokens: int = 256, stop: Sequence[str] = (), **sampling: Any) -> str:
        """The text that the model writes after a prompt.

        ``sampling``: temperature (0: the most probable token), top_k, top_p, min_p, repetition_penalty,
        frequency_penalty, presence_penalty, seed, logit_bias ({id: value}).
        """
        session = Session(self)
        session.prefill(prompt)
        return session.generate(tokens, stop, **sampling).text

    def stream(self, prompt: str, tokens: int = 256, stop: Sequence[str] = (), **sampling: Any) -> Iterator[str]:
        """The same piece by piece, always whole characters."""
        session = Session(self)
        session.prefill(prompt)
        return session.stream(tokens, stop, **sampling)

    def session(self, sequences: int = 1) -> Session:
        return Session(self, sequences)


class Session:
    """One or several texts that a model reads and writes, and what it remembers of them.

    Used by one thread at a time. After ``close()`` (or the end of a ``with`` block) every call is an Error.
    """

    def __init__(self, model: Model, sequences: int = 1, *, _session: _furious.Session | None = None):
        if not isinstance(model, Model):
            raise TypeError(f"session: got a {type(model).__name__}, expected a furious.Model")
        self.model = model
        self._session = _furious.Session(model._model, sequences) if _session is None else _session

    def prefill(self, text: str | Sequence[str] | Ids | Sequence[Ids],
                progress: Callable[[int, int], bool | None] | None = None) -> bool:
        """Goes on reading, in every sequence.

        Args:
            text: a text, or one for each sequence; or token ids, or ids for each sequence (these and no others, so
                that the mark before a document is yours: Model.prompt).
            progress: called with the tokens read and all; False stops.

        Returns:
            Whether all was read.
        """
        if isinstance(text, str):
            return self._session.read_texts([text], False, progress)
        if isinstance(text, (list, tuple)) and text and not np.isscalar(text[0]):
            return self._session.read_ids([_ids(ids) for ids in text], True, progress)
        if isinstance(text, (list, tuple)) and text and isinstance(text[0], str):
            if not all(isinstance(one, str) for one in text):
                raise Error("prefill: texts and ids in one call; give one kind")
            return self._session.read_texts(list(text), True, progress)
        return self._session.read_ids([_ids(text)], False, progress)

    def step(self, ids: int | Ids) -> np.ndarray:
        """Reads one token in every sequence; the logits after it, float32 ``[vocabulary]`` of sequence 0."""
        self._session.step(_ids([ids] if np.isscalar(ids) else ids))
        return self._session.logits(0)

    def logits(self, sequence: int = 0) -> np.ndarray:
        """After the last token of a sequence: float32 ``[vocabulary]``."""
        return self._session.logits(sequence)

    def write(self, tokens: int = 256, stop: Sequence[str] = (),
              show: Callable[[str, int], bool | None] | None = None, **sampling: Any) -> list[Text]:
        """Goes on writing, in every sequence. ``show(piece, sequence)`` gets every text; False ends the writing."""
        return self._session.write(_sampling(**sampling), tokens, list(stop), show)

    def generate(self, tokens: int = 256, stop: Sequence[str] = (), **sampling: Any) -> Text:
        """What the (first) sequence writes: .text, .ids, .ending, .log_probabilities."""
        return self.write(tokens, stop, **sampling)[0]

    def stream(self, tokens: int = 256, stop: Sequence[str] = (), **sampling: Any) -> Iterator[str]:
        """The pieces of the first sequence's text as they are written. Leaving the loop ends the writing."""
        options = _sampling(**sampling)
        pieces: queue.Queue[Any] = queue.Queue()
        ended = threading.Event()

        def show(piece: str, sequence: int) -> bool:
            if sequence == 0:
                pieces.put(piece)
            return not ended.is_set()

        def work() -> None:
            try:
                self._session.write(options, tokens, list(stop), show)
                pieces.put(None)
            except BaseException as error:  # raised where the pieces are read
                pieces.put(error)

        def read() -> Iterator[str]:
            writer = threading.Thread(target=work, daemon=True)
            writer.start()
            try:
                while (piece := pieces.get()) is not None:
                    if isinstance(piece, BaseException):
                        raise piece
                    yield piece
            finally:
                ended.set()
                writer.join()

        return read()

    def fork(self) -> Session:
        """Another session that goes on like this one."""
        return Session(self.model, _session=self._session.fork())

    def save(self, file: str | os.PathLike[str]) -> None:
        """All that it remembers, in a file."""
        self._session.save(os.fspath(file))

    def load(self, file: str | os.PathLike[str]) -> None:
        """Goes on where the saved session was, to the bit."""
        self._session.load(os.fspath(file))

    def save_bytes(self) -> bytes:
        return self._session.save_bytes()

    def load_bytes(self, data: bytes) -> None:
        self._session.load_bytes(data)

    def states(self) -> list[SequenceState]:
        """The same as arrays, one for each sequence (one for all while they are the same text)."""
        return [SequenceState(**state) for state in self._session.states()]

    def set_states(self, states: Sequence[SequenceState]) -> None:
        self._session.set_states([state._dict() for state in states])

    @property
    def sequences(self) -> int:
        return self._session.sequences()

    @property
    def tokens(self) -> int:
        """Read and written so far, in the longest sequence."""
        return self._session.tokens()

    @property
    def nbytes(self) -> int:
        """Memory of the state now."""
        return self._session.bytes()

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class SequenceBatch:
    """Sequences with prompts, lengths and sampling of their own, which join and leave while others go on.

    ::

        batch = furious.SequenceBatch(model, 8)
        a, b = batch.add(temperature=0), batch.add(seed=7)
        batch.prefill({a: "One", b: model.prompt("Another")})
        for id, log_probability, most_probable in batch.step([a, b]): ...
        batch.remove(a)                                         # b goes on, and another may be added

    What a sequence computes depends on its own tokens alone, but for rounding. Used by one thread at a time. After
    ``close()`` (or the end of a ``with`` block) every call is an Error.
    """

    def __init__(self, model: Model, capacity: int):
        if not isinstance(model, Model):
            raise TypeError(f"sequence batch: got a {type(model).__name__}, expected a furious.Model")
        self.model = model
        self.capacity = capacity  #: at most so many sequences at a time
        self._batch = _furious.SequenceBatch(model._model, capacity)

    def add(self, state: SequenceState | None = None, **sampling: Any) -> int:
        """A sequence, empty or from a state, with sampling as in ``Model.generate``; the number that it is known by."""
        options = _sampling(**sampling)
        sequence = self._batch.add() if state is None else self._batch.add_state(state._dict())
        return self._with_sampling(sequence, options)

    def _with_sampling(self, sequence: int, options: _furious.Sampling) -> int:
        try:
            self._batch.set_sampling(sequence, options)
        except Error:
            self._batch.remove(sequence)
            raise
        return sequence

    def fork(self, sequence: int, **sampling: Any) -> int:
        """Another sequence that goes on from what this one has read, with sampling of its own."""
        options = _sampling(**sampling)
        return self._with_sampling(self._batch.fork(sequence), options)

    def remove(self, sequence: int) -> None:
        """Frees the place of a sequence. Its number may be used again."""
        self._batch.remove(sequence)

    @property
    def sequences(self) -> list[int]:
        """Numbers in use, in ascending order."""
        return self._batch.sequences()

    def set_sampling(self, sequence: int, **sampling: Any) -> None:
        self._batch.set_sampling(sequence, _sampling(**sampling))

    def prefill(self, prompts: dict[int, str | Ids], progress: Callable[[int, int], bool | None] | None = None) -> bool:
        """Goes on reading, in several sequences together.

        Args:
            prompts: by the number of the sequence a text, or token ids. The mark before a document is added to the
                first text of a sequence, and never to ids.
            progress: called with the tokens read and all; False stops.

        Returns:
            Whether all was read.
        """
        return self._batch.read([(sequence, self._prompt(sequence, text)) for sequence, text in prompts.items()],
                                progress)

    def _prompt(self, sequence: int, text: str | Ids) -> np.ndarray:
        if isinstance(text, str):
            text = self.model.encode(text) if self._batch.tokens(sequence) else self.model.prompt(text)
        return _ids(text)

    def step(self, sequences: Sequence[int] | None = None,
             ids: Ids | None = None) -> list[tuple[int, float, list[tuple[int, float]]]] | None:
        """Advances sequences (``None``: all) by one token.

        Without ``ids`` a token is chosen in each and read. Returns (id, log P, most probable) of each, in their order;
        log P is 0 where the sampling option log_probabilities asks for none. With ``ids`` these are read instead.
        """
        own = self.sequences if sequences is None else list(sequences)
        if ids is None:
            return self._batch.step(own)
        self._batch.step_ids(own, _ids(ids))
        return None

    def logits(self, sequence: int) -> np.ndarray:
        """After the last token of a sequence: float32 ``[vocabulary]``."""
        return self._batch.logits(sequence)

    def state(self, sequence: int) -> SequenceState:
        """What a sequence remembers, as arrays."""
        return SequenceState(**self._batch.state(sequence))

    def tokens(self, sequence: int) -> int:
        """Read and written so far."""
        return self._batch.tokens(sequence)

    @property
    def nbytes(self) -> int:
        """Memory of all states now."""
        return self._batch.bytes()

    def close(self) -> None:
        self._batch.close()

    def __enter__(self) -> SequenceBatch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
