"""Model types that are refused, and why."""

_REASONS = {
    "its experts differ in form from the supported ones": "phimoe granitemoe dbrx llama4 llama4_text ernie4_5_moe "
    "minimax_m2 hunyuan_v1_moe",
    "its attention is latent (MLA)": "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 minicpm3 mistral4",
    "its Gated DeltaNet layers differ in form from the supported ones": "olmo_hybrid",
    "some of its layers are Mamba": "mamba mamba2 falcon_mamba nemotron_h bamba jamba zamba2 falcon_h1 "
    "granitemoehybrid",
    "some of its layers share keys and values": "gemma3n gemma3n_text",
    "layers of its form are not implemented yet": "cohere cohere2 glm gpt_neox gpt_bigcode falcon phi opt "
    "bloom stablelm",
    "it reads images or audio": "llava llava_next llava_onevision qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe "
    "qwen2_audio qwen2_5_omni internvl idefics3 smolvlm mllama paligemma pixtral whisper phi4_multimodal",
    "it is an encoder-decoder": "t5 mt5 umt5 bart mbart pegasus marian m2m_100 t5gemma",
    "it is an encoder": "bert roberta xlm-roberta distilbert deberta-v2 electra modernbert mpnet nomic_bert",
}
UNSUPPORTED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""By model_type: why it is not supported."""
ON_A_SERVER = "A server may run it (docs/servers.md); in the job file: server: {serve: [vllm, serve, MODEL]}"
