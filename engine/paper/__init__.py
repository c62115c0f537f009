"""The papers' tables and figures, made on this machine: `papers.py` lists them, `tables.py` says what makes each."""
