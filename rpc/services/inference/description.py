"""Descriptions of the server and its model."""

from rpc.distribution import own_version
from rpc.services.inference import pb
from rpc.services.inference.asking import VERSION
from rpc.services.inference.tensors import IMAGE, INPUTS, OUTPUTS, TEXT, Tensor

NAME = "quire"
EXTENSIONS = ("model_configuration", "parameters", "statistics")
TYPES = {"BYTES": pb.TYPE_STRING, "BOOL": pb.TYPE_BOOL, "FP32": pb.TYPE_FP32, "UINT32": pb.TYPE_UINT32}


def server_metadata() -> pb.ServerMetadataResponse:
    return pb.ServerMetadataResponse(name=NAME, version=own_version(), extensions=EXTENSIONS)


def model_metadata(model: str, vision: bool) -> pb.ModelMetadataResponse:
    """Returns the model's inputs and outputs. vision: it takes images."""
    metadata = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=model,
        versions=[VERSION],
        platform=NAME,
        inputs=[metadata(name=t.name, datatype=t.datatype, shape=[t.size]) for t in _inputs(vision)],
        outputs=[metadata(name=t.name, datatype=t.datatype, shape=[t.size]) for t in OUTPUTS],
    )


def model_config(model: str, vision: bool) -> pb.ModelConfig:
    """Returns the model's configuration in Triton's form. vision: it takes images."""
    return pb.ModelConfig(
        name=model,
        backend=NAME,
        input=[
            pb.ModelInput(name=t.name, data_type=TYPES[t.datatype], dims=[t.size], optional=t is not TEXT)
            for t in _inputs(vision)
        ],
        output=[pb.ModelOutput(name=t.name, data_type=TYPES[t.datatype], dims=[t.size]) for t in OUTPUTS],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
    )


def _inputs(vision: bool) -> list[Tensor]:
    return [tensor for tensor in INPUTS if vision or tensor is not IMAGE]
