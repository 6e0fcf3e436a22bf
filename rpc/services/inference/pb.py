"""Messages of proto/inference/grpc_service.proto, in a descriptor pool of their own.

Clients of the protocol (tritonclient, kserve) define `inference.*` in protobuf's default pool. A second definition
there would fail the second import. So `make proto` writes no module, but the descriptors (pb.binpb) and the types of
these names (pb.pyi).
"""

from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

_files = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_suffix(".binpb").read_bytes()).file
_pool = descriptor_pool.DescriptorPool()
for _file in _files:
    _pool.Add(_file)

DESCRIPTOR = _pool.FindFileByName(_files[-1].name)
for _name, _message in DESCRIPTOR.message_types_by_name.items():
    globals()[_name] = message_factory.GetMessageClass(_message)
for _name, _enum in DESCRIPTOR.enum_types_by_name.items():
    globals()[_name] = EnumTypeWrapper(_enum)
    globals().update((value.name, value.number) for value in _enum.values)
