"""The page of arr-coc as a Space. BASE_MODEL names a model other than the embedded one; it needs a GPU of 16 GB."""

import os
from pathlib import Path

from arr_coc.demo.app import build, serve
from arr_coc.demo.engine import Engine

engine = Engine.open(os.environ.get("BASE_MODEL"), os.environ.get("SELECTOR"), private=False)
engine.warm_up()
page = build(engine, Path("votes.jsonl"))

if __name__ == "__main__":
    serve(page, host="0.0.0.0", port=int(os.environ.get("PORT", "7860")))
    page.block_thread()
