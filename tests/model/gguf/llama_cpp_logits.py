"""Computes logits with llama.cpp, through llama-cpp-python's low-level interface. Needs that and numpy alone.

python tests/model/gguf/llama_cpp_logits.py MODEL.gguf IDS.npy LOGITS.npy
"""

import sys

import llama_cpp as lib
import numpy as np

NOT_LOADED = 3  # exit code
CONTEXT = 64  # as short as the original contexts of models whose factors depend on it


def main(model: str, ids: str, out: str) -> None:
    """Writes the logits after each id, [ids, vocabulary] float32."""
    tokens = np.load(ids).tolist()
    lib.llama_backend_init()
    options = lib.llama_model_default_params()
    options.n_gpu_layers = 0
    loaded = lib.llama_model_load_from_file(model.encode(), options)
    if not loaded:
        sys.exit(NOT_LOADED)
    settings = lib.llama_context_default_params()
    settings.n_ctx = settings.n_batch = CONTEXT
    settings.type_k = settings.type_v = 0  # float32
    settings.flash_attn_type = 0
    context = lib.llama_init_from_model(loaded, settings)
    if not context:
        sys.exit("llama.cpp makes no context for it")
    batch = lib.llama_batch_init(CONTEXT, 0, 1)
    for place, token in enumerate(tokens):
        batch.token[place], batch.pos[place], batch.n_seq_id[place], batch.seq_id[place][0] = token, place, 1, 0
        batch.logits[place] = True
    batch.n_tokens = len(tokens)
    if lib.llama_decode(context, batch):
        sys.exit("llama.cpp does not compute it")
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded))
    rows = [np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (size,)) for i in range(len(tokens))]
    np.save(out, np.stack(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
