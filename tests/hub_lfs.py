"""The large-file store of the stand-in hub: git's LFS protocol, whole or in parts.

A client without the package hf_xet sends by it what the hub calls "lfs". One that has hf_xet sends such files by Xet,
another protocol, without asking which the hub speaks; there is no Xet here, neither for sending nor for fetching.
"""

import hashlib
from typing import Any

#: Larger objects are sent in parts of this many bytes.
PART = 64 << 10


class LargeFiles:
    """Objects by the sha256 of their content; nothing gets in under another name."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        #: How objects came, in order: "basic" or "multipart", and the sha256.
        self.uploads: list[tuple[str, str]] = []
        self._parts: dict[str, dict[int, bytes]] = {}

    def batch(self, wanted: dict[str, Any], repository: str) -> dict[str, Any]:
        """What the client has to do for each object; nothing for one that is there.

        Args:
            wanted: the request, whose form the protocol lays down.
            repository: address of the repository.
        """
        assert wanted["operation"] == "upload" and wanted["hash_algo"] == "sha256", wanted
        assert {"basic", "multipart"} <= set(wanted["transfers"]), wanted
        store = f"{repository}.git/info/lfs"
        answers = []
        for each in wanted["objects"]:
            oid, size = each["oid"], each["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
            if oid not in self.objects:
                upload: dict[str, Any] = {"href": f"{store}/objects/{oid}"}
                if size > PART:
                    count = -(-size // PART)
                    parts = {str(number): f"{store}/objects/{oid}/{number}" for number in range(1, count + 1)}
                    upload = {"href": f"{store}/complete", "header": {"chunk_size": str(PART), **parts}}
                answer["actions"] = {"upload": upload, "verify": {"href": f"{store}/verify"}}
            answers.append(answer)
        return {"transfer": "basic", "objects": answers}

    def put(self, oid: str, data: bytes, way: str = "basic") -> bool:
        """Take an object; False if its content is not what its name says."""
        if hashlib.sha256(data).hexdigest() != oid:
            return False
        self.objects[oid] = data
        self.uploads.append((way, oid))
        return True

    def put_part(self, oid: str, number: int, data: bytes) -> str:
        """Take a part; returns its tag, which the client has to name in the end."""
        self._parts.setdefault(oid, {})[number] = data
        return hashlib.md5(data, usedforsecurity=False).hexdigest()

    def complete(self, said: dict[str, Any]) -> bool:
        """Join the parts of an object; False if one is missing, changed, or the content is not what its name says."""
        parts = self._parts.pop(said["oid"], {})
        tags = {number: hashlib.md5(data, usedforsecurity=False).hexdigest() for number, data in sorted(parts.items())}
        named = {part["partNumber"]: part["etag"].strip('"') for part in said["parts"]}
        whole = b"".join(parts[number] for number in sorted(parts))
        return tags == named and self.put(said["oid"], whole, "multipart")

    def has(self, said: dict[str, Any]) -> bool:
        """Whether an object of that name and size is there."""
        return len(self.objects.get(said["oid"], b"")) == said["size"]

    def oid_of(self, data: bytes | None) -> str | None:
        """The name of a content that is stored here; None for any other."""
        found = None if data is None else hashlib.sha256(data).hexdigest()
        return found if found in self.objects else None


def pointer(oid: str, size: int) -> bytes:
    """What git itself keeps of an object."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()
