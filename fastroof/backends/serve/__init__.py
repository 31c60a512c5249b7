"""Plans served to other processes: JSON lines on a pipe, or JSON and Arrow IPC streams over HTTP.

:mod:`~fastroof.backends.serve.stdio` answers lines on standard input,
:mod:`~fastroof.backends.serve.http_server` requests over HTTP, and
:class:`~fastroof.backends.serve.client.PlanClient` asks. Both answer from the plans of
:mod:`~fastroof.backends.serve.answer`; messages of JSON are answered by
:mod:`~fastroof.backends.serve.messages`, and :mod:`~fastroof.backends.serve.forms` lists what they may hold.
"""
