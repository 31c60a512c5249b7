"""Plans served to other processes: JSON lines on a pipe, or JSON and Arrow IPC streams over HTTP.

:mod:`~fastroof.backends.serve.stdio` answers lines on standard input,
:mod:`~fastroof.backends.serve.http_server` requests over HTTP, and
:class:`~fastroof.backends.serve.client.PlanClient` asks. Messages are the models of
:mod:`~fastroof.backends.serve.messages`, answered by :mod:`~fastroof.backends.serve.answers`.
"""
