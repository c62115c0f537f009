"""An OpenAI-compatible server over the engine: Starlette and uvicorn before one queue of answers."""
