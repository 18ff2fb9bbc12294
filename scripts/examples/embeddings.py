"""Search by meaning: the dot product of two embeddings is their cosine similarity."""

import llamagpu

DOCUMENTS = [
    "The cat sleeps on the warm sofa.",
    "Interest rates rose by half a percent.",
    "Add the flour and bake it for an hour.",
]

with llamagpu.load("smollm2") as llama:
    documents = llama.embed(DOCUMENTS)  # [3, dim] float32
    for query in ("A kitten takes a nap.", "The central bank's decision.", "A recipe for bread."):
        similarity = documents @ llama.embed(query)
        best = similarity.argmax()
        print(f"{query:30} {similarity[best]:.3f} {DOCUMENTS[best]}")
