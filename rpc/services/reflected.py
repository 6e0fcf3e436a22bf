"""The descriptors for server reflection: those of the default pool and of the Open Inference Protocol."""

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from rpc.services.inference import pb


class ReflectedPool:
    """The part of a DescriptorPool that grpc_reflection uses, over two pools.

    Methods raise KeyError for a descriptor that neither pool has.
    """

    def __init__(self) -> None:
        self._default, self._inference = descriptor_pool.Default(), pb.DESCRIPTOR.pool

    def FindFileByName(self, name: str) -> FileDescriptor:  # noqa: N802 - protobuf's name
        return self._of(name.startswith("inference/")).FindFileByName(name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802
        return self._of(symbol.startswith("inference.")).FindFileContainingSymbol(symbol)

    def FindMessageTypeByName(self, name: str) -> Descriptor:  # noqa: N802
        return self._of(name.startswith("inference.")).FindMessageTypeByName(name)

    def FindExtensionByNumber(self, message: Descriptor, number: int) -> FieldDescriptor:  # noqa: N802
        return self._default.FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Descriptor) -> list[FieldDescriptor]:  # noqa: N802
        return self._default.FindAllExtensions(message)

    def _of(self, inference: bool) -> descriptor_pool.DescriptorPool:
        return self._inference if inference else self._default
