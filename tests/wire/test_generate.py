"""The checked-in protobuf code equals the output of its generator, and its messages match the SDK's."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from tinker.proto import tinker_public_pb2

from tinkerflow.backend.wire import tinker_pb2
from tinkerflow.backend.wire.generate import generate


def test_regenerating_gives_the_same_files(tmp_path: Path) -> None:
    generate(tmp_path)
    here = Path(tinker_pb2.__file__).parent
    for name in ("tinker_pb2.py", "tinker_pb2.pyi"):
        assert (tmp_path / "tinkerflow/backend/wire" / name).read_text() == (here / name).read_text()


def test_messages_match_the_sdk() -> None:
    def shape(descriptor: object) -> dict[str, object]:
        file = FileDescriptorProto()
        descriptor.CopyToProto(file)  # type: ignore[attr-defined]
        fields = {
            m.name: {
                (f.number, f.name, f.type, f.label, f.type_name.rsplit(".", 1)[-1], f.proto3_optional) for f in m.field
            }
            for m in file.message_type
        }
        enums = {e.name: {(v.number, v.name) for v in e.value} for e in file.enum_type}
        return {**fields, **enums}

    ours, theirs = shape(tinker_pb2.DESCRIPTOR), shape(tinker_public_pb2.DESCRIPTOR)
    assert ours.pop("ForwardBackwardHeader") and ours.pop("WeightsSpan")
    beyond = {field for field in ours["SampledSequence"] if field[0] >= 100}  # far above the SDK's field numbers
    assert [field[1] for field in beyond] == ["weights"]
    ours["SampledSequence"] -= beyond
    unused = {"SamplingParams", "StopStrings", "StopTokens"}  # declared by the SDK, and never sent
    assert ours == {name: fields for name, fields in theirs.items() if name not in unused}
