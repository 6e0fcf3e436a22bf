"""The policy of each rpc: the token that its caller needs. An rpc without a policy is refused to all callers."""

from enum import Enum


class Policy(Enum):
    """Token that a caller needs.

    Attributes:
        OPEN: None.
        CLIENT: Any token of the server, if it has tokens.
        OPERATOR: A token of an operator, if the server has tokens.
    """

    OPEN = "open"
    CLIENT = "client"
    OPERATOR = "operator"


def _of(service: str, policy: Policy, *methods: str) -> dict[str, Policy]:
    return {f"/{service}/{method}": policy for method in methods}


POLICIES: dict[str, Policy] = {
    # A load balancer's probe has no token, and learns nothing but that the server lives.
    **_of("grpc.health.v1.Health", Policy.OPEN, "Check"),
    **_of("grpc.health.v1.Health", Policy.CLIENT, "Watch"),
    **_of("quire.v1.GenerationService", Policy.CLIENT, "Generate", "StreamGenerate", "BatchGenerate"),
    **_of("quire.v1.ModelService", Policy.CLIENT, "ListModels", "GetModel"),
    **_of("quire.v1.TokenizationService", Policy.CLIENT, "Tokenize", "Detokenize"),
    **_of(
        "quire.v1.AdminService",
        Policy.OPERATOR,
        "GetPageMap",
        "ResetPrefixCache",
        "ListReplicas",
        "DrainReplica",
        "ResumeReplica",
        "RestartReplica",
        "GetServerInfo",
        "GetLoad",
        "WatchLoad",
        "ListRequests",
        "CancelRequest",
    ),
    **_of(
        "inference.GRPCInferenceService",
        Policy.CLIENT,
        "ServerLive",
        "ServerReady",
        "ModelReady",
        "ServerMetadata",
        "ModelMetadata",
        "ModelConfig",
        "ModelStatistics",
        "ModelInfer",
        "ModelStreamInfer",
        # Not supported; a client with a token gets that answer.
        "RepositoryIndex",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    ),
    **_of("grpc.reflection.v1alpha.ServerReflection", Policy.CLIENT, "ServerReflectionInfo"),
}
"""Policy by the path of the rpc."""
