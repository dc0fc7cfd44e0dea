"""Mutual authentication of two agents of a run.

    follower to leader:  a magic number, the follower's node rank, the follower's nonce
    leader to follower:  the leader's nonce, the leader's proof
    follower to leader:  the follower's proof
    follower to leader:  a message with its host's facts
    leader to follower:  a message that confirms admission; until it arrives, the follower may try again

A proof is an HMAC-SHA256 with the run's key over the proving role, the run's ID, the follower's node rank and both
nonces. A proof for one role, node or connection is therefore invalid for any other. Later messages carry tags made with
keys derived from the same values, one key per direction. A man in the middle can delay messages, but cannot change,
replay or forge them.

The functions do not perform I/O: they are generators that yield the bytes to send and the number of bytes to receive.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from worldsize.net.credentials import RunKey
from worldsize.strict_json import parse_strict_json, sanitize_json

Message = Mapping[str, Any]
LENGTH = struct.Struct(">I")  # length prefix of every message
LONGEST = 1 << 20  # maximum bytes per message
TAG_BYTES = 32
_MAGIC = b"wsAgent3"
_NONCE_BYTES = 32
_HELLO = struct.Struct(f">8sI{_NONCE_BYTES}s")
_COUNT = struct.Struct(">Q")


class NotOfThisRunError(ConnectionError):
    """The peer is not an authenticated agent of this run, or a message is not authentic."""


class Turn(NamedTuple):
    """A handshake step: send the bytes ``send``, then receive ``receive`` bytes."""

    send: bytes
    receive: int


class Admitted(NamedTuple):
    """An authenticated follower: its node rank, its connection's seal, and its host's facts."""

    rank: int
    seal: MessageSeal
    facts: Message


@final
class MessageSeal:
    """Authenticates the messages of one connection: each is JSON with a length prefix and a tag.

    A tag is an HMAC over the message's sequence number in its direction and the message's bytes. ``name`` identifies
    the connection and is the same at both ends.
    """

    def __init__(self, *, sending: bytes, receiving: bytes) -> None:
        self._sending, self._receiving = sending, receiving  # keys
        self._sent = self._received = 0
        self.name = hashlib.sha256(b"".join(sorted((sending, receiving)))).hexdigest()[:16]

    def seal_message(self, message: Message) -> bytes:
        """Encode and tag the next message to send."""
        text = json.dumps(sanitize_json(message)).encode()
        sealed = LENGTH.pack(len(text)) + text + _compute_tag(self._sending, self._sent, text)
        self._sent += 1
        return sealed

    def bytes_after(self, head: bytes) -> int:
        """Return the number of bytes that follow the length prefix ``head``.

        Raises:
            NotOfThisRunError: the message is too long.
        """
        (length,) = LENGTH.unpack(head)
        if length > LONGEST:
            raise NotOfThisRunError(f"a message of {length} bytes is too long (maximum {LONGEST})")
        return int(length) + TAG_BYTES

    def open_message(self, body: bytes) -> Message:
        """Verify and decode the next message. Raises NotOfThisRunError if it is not authentic."""
        text, tag = body[:-TAG_BYTES], body[-TAG_BYTES:]
        if not hmac.compare_digest(tag, _compute_tag(self._receiving, self._received, text)):
            raise NotOfThisRunError("invalid message authentication tag")
        self._received += 1
        try:
            message = parse_strict_json(text, at_most=LONGEST)
        except ValueError as error:
            raise NotOfThisRunError(f"invalid message: {error}") from None
        if not isinstance(message, dict):
            raise NotOfThisRunError("invalid message: expected a JSON object")
        return message


@final
@dataclass(frozen=True)
class _Transcript:
    """The values exchanged in a handshake, from which all proofs and keys are derived."""

    key: RunKey
    rank: int  # the follower's node rank
    follower_nonce: bytes
    leader_nonce: bytes

    def compute_digest(self, purpose: str) -> bytes:
        rank = _COUNT.pack(self.rank)
        parts = (purpose.encode(), self.key.run_id.encode(), rank, self.follower_nonce, self.leader_nonce)
        text = b"".join(LENGTH.pack(len(part)) + part for part in parts)
        return hmac.digest(self.key.secret, text, "sha256")

    def check_proof(self, proof: bytes, role: str) -> None:
        """Raise NotOfThisRunError unless ``proof`` is valid for ``role``."""
        if not hmac.compare_digest(proof, self.compute_digest(f"proof of the {role}")):
            raise NotOfThisRunError(f"authentication as the {role} of this run failed")

    def create_proof(self, role: str) -> bytes:
        return self.compute_digest(f"proof of the {role}")

    def create_seal(self, role: str, peer: str) -> MessageSeal:
        """Return the seal for the end of the connection that ``role`` holds."""
        return MessageSeal(
            sending=self.compute_digest(f"messages of the {role}"),
            receiving=self.compute_digest(f"messages of the {peer}"),
        )


def authenticate_leader(key: RunKey, rank: int) -> Generator[Turn, bytes, MessageSeal]:
    """Authenticate the leader, then prove that this process is the agent for node ``rank``.

    Raises:
        NotOfThisRunError: the peer is not the leader of this run; no proof was sent to it.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    answer = yield Turn(_HELLO.pack(_MAGIC, rank, nonce), _NONCE_BYTES + TAG_BYTES)
    transcript = _Transcript(key, rank, nonce, answer[:_NONCE_BYTES])
    transcript.check_proof(answer[_NONCE_BYTES:], "leader")
    yield Turn(transcript.create_proof("follower"), 0)
    return transcript.create_seal("follower", "leader")


def authenticate_follower(key: RunKey, ranks: range) -> Generator[Turn, bytes, Admitted]:
    """Authenticate a follower in ``ranks`` as the leader, and receive its host's facts.

    Raises:
        NotOfThisRunError: the peer is not a follower of this run.
    """
    magic, rank, nonce = _HELLO.unpack((yield Turn(b"", _HELLO.size)))
    if magic != _MAGIC or rank not in ranks:
        raise NotOfThisRunError("invalid greeting for a node of this run")
    transcript = _Transcript(key, rank, nonce, secrets.token_bytes(_NONCE_BYTES))
    proof = yield Turn(transcript.leader_nonce + transcript.create_proof("leader"), TAG_BYTES)
    transcript.check_proof(proof, "follower")
    seal = transcript.create_seal("leader", "follower")
    length = seal.bytes_after((yield Turn(b"", LENGTH.size)))
    facts = seal.open_message((yield Turn(b"", length)))
    if facts.get("node") != rank or not isinstance(facts.get("host"), str):
        raise NotOfThisRunError(f"node {rank} sent an invalid description")
    return Admitted(rank, seal, facts)


def _compute_tag(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, _COUNT.pack(number) + text, "sha256")
