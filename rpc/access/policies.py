"""What each rpc asks of its caller. One that is not named here is refused to everybody."""

from enum import Enum


class Policy(Enum):
    """OPEN: anybody. CLIENT: who has a token, where there are tokens. OPERATOR: whose token is an operator's."""

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
        # Not supported, and said so to whoever may come in.
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
"""By the path of the rpc."""
