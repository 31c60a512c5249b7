"""The local page: explore a model on GPUs under a load interactively, in a browser.

:mod:`fastroof.ui.answers` computes the numbers from plans; :mod:`fastroof.ui.server` serves the page on this
machine only. Starlette and uvicorn, the extra ``ui``, are imported when it is served.
"""
