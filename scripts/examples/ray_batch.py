"""Prompts of a Parquet file answered by several actors, each with a model on a GPU of its own.

Needs `pip install "llamagpu[ray]"`. Without GPUs that Ray knows, start it with resources={"webgpu": N} for N adapters.
"""

import tempfile
from pathlib import Path

import ray

from llamagpu.ray import Predictor

folder = Path(tempfile.mkdtemp())
ray.init(num_cpus=2, resources={"webgpu": 1}, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
questions = ["What is the capital of France?", "Which colour has the sky?"]
ray.data.from_items([{"prompt": question} for question in questions]).write_parquet(str(folder / "prompts"))

answers = ray.data.read_parquet(str(folder / "prompts")).map_batches(
    Predictor,
    fn_constructor_kwargs={"model": "smollm2", "max_tokens": 24, "sampling": {"temperature": 0}},
    batch_size=64,
    concurrency=1,  # actors
    num_cpus=0,
    resources={"webgpu": 1},  # or num_gpus=1, of each
)
answers.write_parquet(str(folder / "answers"))
for row in ray.data.read_parquet(str(folder / "answers")).take_all():
    print(f"> {row['prompt']}\n{row['answer']}")
