"""What the panel's words mean, section by section; `TERMS` has each word by itself."""

from __future__ import annotations

MEANINGS = {
    "speed": "Decode: tokens written per second, in the last second and (mean) over the answer; the bars are the "
    "latest seconds. Prefill: tokens of the prompt read per second. The first token comes after all of it was read; "
    "tokens kept are those that the KV cache had from the turn before.",
    "origins": "Rows are neurons' weights; none has to move where all of them are computed in place. Ready: in GPU "
    "memory when needed. Coming: requested ahead and on the way. Copied: fetched when needed. On CPU: computed in RAM. "
    "Left out: weak neurons whose rows were not in GPU memory; the quality dial can skip these, and answers "
    "then vary with what is in memory. Expert hit rate: expert calls with at least half their rows in GPU memory or "
    "coming. The predictor names the next layer's neurons: recall is how many of the needed neurons it named (by "
    "layer, first to last), precision how many of the named neurons were needed. Substituted: experts that others in "
    "GPU memory replaced. Dropped: expert halves of low score.",
    "link": "Between RAM and GPU: what it moved for one token, how long the GPU waited for that, how fast it was while "
    "busy, of what it can, and for which share of the time it was busy.",
    "neurons": "Units of the experts that the router picked. Inactive ones are skipped, which is what makes this fast. "
    "Read per token: bytes of weights that the rest took. The bars show the active share of each layer, first to last.",
    "experts": "Which experts the router called: layers from left to right, experts downwards, the brighter the more "
    "often. Busiest: the largest share that one expert had of its layer's calls. /experts has each layer by itself.",
    "memory": "RAM of this process. KV cache: what the model keeps of the chat; context: how much of its window that "
    "is. VRAM: the GPU's memory that is in use, of the budget: what may be used. Resident part: weights that are "
    "always there. Dense: layers around the experts. Up: what finds active neurons. Pool: rows that are used most, of "
    "what there is room for. Rest: buffers, and what is free.",
    "backend": "Where the model computes, with which kernels, the bits per weight, and why these.",
}

TERMS = (
    ("decode", "tokens the model writes per second: in the last second, and over the whole answer"),
    ("prefill", "tokens of your question and the chat before it that are read per second"),
    ("time to first token", "from Enter to the first piece of the answer"),
    ("expert", "one of several small networks in each layer; the model picks a few for every token"),
    ("neuron", "one unit of an expert; the inactive ones are skipped, which is what makes this fast"),
    ("active share", "neurons of the picked experts that took part, over all layers and by layer"),
    ("bytes read per token", "weights that the picked experts had to read to write one token"),
    ("Experts", "the share of calls that went to each expert: layers to the right, experts downwards"),
    ("KV cache", "what the model keeps of the chat so far; context is how much of its window that fills"),
    ("model, resident part", "the part of the model that is always in the device's memory"),
    ("preset", "how many neurons may be skipped: slower and closer to the full model, or faster"),
    ("Backend", "where the model computes, with which kernels, and why those"),
    ("tokens kept", "the part of the prompt that the KV cache held from the turn before: no time went into it"),
    ("Rows", "a neuron's weights. Shown when GPU memory holds a part of the rows only; the rest is in RAM"),
    ("hit rate, ready", "active neurons whose rows were in GPU memory when they were wanted"),
    ("coming", "rows that had been asked for before they were wanted, and were on their way"),
    ("copied", "rows that came from RAM when they were wanted"),
    ("on CPU", "neurons that the CPU computed where their rows lie, so that nothing had to move"),
    ("left out", "weak neurons whose rows were not in GPU memory and were skipped: answers vary with what is there"),
    ("expert hit rate", "calls of an expert with at least half their rows in GPU memory, or on their way there"),
    ("predictor recall", "of the neurons that became active, those that were named one layer ahead"),
    ("its precision", "of the neurons that were named, those that became active"),
    ("experts foreseen", "on the Experts page: likewise of the experts that were called, and of those that were named"),
    ("substituted, dropped", "experts for which others in GPU memory stood in; expert halves skipped, of low score"),
    ("Link", "between RAM and GPU: what it moved for one token, how fast, and how long the GPU waited for that"),
    ("dense, up, pool", "GPU memory for the layers around the experts, for what finds active neurons, and for rows"),
    ("budget", "GPU memory that may be used: what was free at the start, less a reserve, or what --vram says"),
    (
        "virtual time",
        "times of a card that is not in this machine, by its profile, and of this program's own code here",
    ),
    ("—", "not measured yet. kB, MB and GB are powers of 1000"),
)
