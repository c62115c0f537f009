"""The meanings of the panel's words, section by section; `TERMS` has each word separately."""

from __future__ import annotations

BITS = "bits per weight read or stored; fewer are smaller and faster, and less exact"
KL = (
    "how far the model's next-word probabilities move from the 16-bit original's, in nats: "
    "0 is identical, below 0.01 is hard to notice, above 0.1 is noticeable. Lower is better"
)

MEANINGS = {
    "speed": "Tokens per second: how fast the answer is written, from its first token to its last. The bars show the "
    "last minute, second by second. Prefill: tokens of the prompt read per second. First token: the time from Enter to "
    "the first piece of the answer. Prompt reused: the part whose keys and values were kept. Drafts: tokens guessed, "
    "and computed together; those accepted are what the model writes anyway. 1.4x: how many times as fast that was as "
    "one after the other. Nothing is guessed while several answers are computed at once.",
    "origins": "Split: layers are whole on the GPU, or computed by the CPU. Rows are the weights of neurons. "
    "A part of them is in GPU memory, the rest in RAM. Ready: in GPU memory when needed, also if "
    "prefetched. Coming: prefetched, and still on the way. Copied: fetched when needed. On CPU: computed by the CPU "
    "from RAM. Left out: weak neurons whose rows were not in GPU memory, skipped if F4 is set so; answers then vary. "
    "Expert hit rate: expert calls with at least half of their rows ready or coming. The "
    "predictor names the neurons of the next layer. Recall: how many of the needed ones it named (by layer, first to "
    "last). Precision: how many of the named ones were needed. Substituted: experts replaced by others "
    "in GPU memory. Halved: experts with a low score, of which only the more important half ran.",
    "link": "The link between RAM and GPU: bytes moved per token, how long the GPU waited for them, the speed while it "
    "was busy and that speed as a share of its peak, and the share of time it was busy. Hidden: the share "
    "of that time in which it moved rows that were needed while the GPU worked on.",
    "neurons": "Neurons are the units of an expert. Inactive ones are skipped, which is what makes this fast. Active "
    "share: of the neurons in the picked experts. Bytes read: weights read to write one token. The bars show each "
    "layer, first to last.",
    "experts": "Which experts the router called: layers from left to right, experts downwards, brighter is more often. "
    "Busiest: the largest share of its layer's calls. /experts shows each layer.",
    "memory": "RAM: of this process. KV cache: what the model stores of the chat. Context: how much of the window the "
    "chat fills. VRAM: GPU memory in use, of the budget. Resident weights: always in memory. Dense: layers around the "
    "experts. Up: what finds active neurons. Pool: the rows used most. Rest: buffers and free memory.",
    "backend": f"Where the model computes, with which kernels, and why. Bits: {BITS}.",
}

TERMS = (
    ("tokens/s", "how fast an answer is written, from its first token to its last"),
    ("prefill", "tokens of your question and the chat before it, read per second"),
    ("first token", "the time from Enter to the first piece of the answer"),
    ("prompt reused", "the part of the prompt whose keys and values were kept, and cost next to no time"),
    ("drafts accepted", "of the tokens guessed, how many the model wrote, and how many times as fast it was"),
    ("expert", "one of several small networks in each layer; the model picks a few for every token"),
    ("neuron", "one unit of an expert; inactive ones are skipped, which is what makes this fast"),
    ("active share", "the share of the picked experts' neurons that were computed"),
    ("bytes read per token", "weights of the picked experts that were read to write one token"),
    ("bits", BITS),
    ("KL", KL),
    ("preset", "how many neurons are skipped: Exact none, Fast the most"),
    ("quantization", "storing weights with fewer bits than the original's 16"),
    ("Experts", "the share of calls that each expert got: layers to the right, experts downwards"),
    ("KV cache", "what the model stores of the chat so far"),
    ("context", "tokens of the chat so far, and how many fit the model's window"),
    ("resident weights", "the part of the model that is always in memory"),
    ("Backend", "where the model computes, with which kernels, and why"),
    ("Rows", "the weights of neurons; shown when GPU memory holds only a part of them"),
    ("hit rate, ready", "active neurons whose rows were in the pool when needed; the rate is of the pool's layers"),
    ("Split", "layers whole on the GPU and layers computed by the CPU, without a pool; F4 or /mix pool makes one"),
    ("coming", "rows that were prefetched and still on the way when needed; a small model's come in time"),
    ("copied", "rows that were fetched from RAM when needed"),
    ("on CPU", "neurons that the CPU computed from RAM, so that nothing had to move"),
    ("left out", "weak neurons, skipped because their rows were not in GPU memory; answers then vary"),
    ("expert hit rate", "expert calls with at least half of their rows ready or coming"),
    ("predictor recall", "the share of active neurons that were predicted one layer ahead"),
    ("its precision", "the share of predicted neurons that became active"),
    ("substituted, halved", "experts replaced by others in GPU memory; experts of which only one half ran"),
    ("Link", "the link between RAM and GPU: bytes moved per token, speed, and how long the GPU waited"),
    ("dense, up, pool", "GPU memory for layers around the experts, for finding active neurons, and for rows"),
    ("budget", "GPU memory that floe-chat may use: --vram, or what was free at the start less a reserve"),
    ("virtual time", "times of a simulated card, from its published figures, plus the time of floe-chat's own code"),
    ("—", "not measured yet. kB, MB and GB are powers of 1000"),
)
