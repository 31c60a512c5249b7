"""The local page: a model on GPUs under a load, and all that plans say of it, as controls change.

What it answers are plans' own answers (:mod:`fastroof.ui.answers`, :mod:`fastroof.ui.answers`,
:mod:`fastroof.ui.answers`); :mod:`fastroof.ui.server` serves it on this machine alone. Starlette and
uvicorn are the extra ``ui``, and are imported when it is served.
"""
