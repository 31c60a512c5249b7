"""Plans served to other processes: on a pipe, over Arrow Flight, or over HTTP.

:mod:`~fastroof.backends.serve.stdio` answers on standard input and output, in the forms of
:mod:`~fastroof.backends.serve.frames` and :mod:`~fastroof.backends.serve.json_lines`;
:class:`~fastroof.backends.serve.client.StdioClient` asks. :mod:`~fastroof.backends.serve.flight` answers
over Arrow Flight, in record batches of steps, and :mod:`~fastroof.backends.serve.http_server` over HTTP, the
messages of JSON lines. All ask the plans of
:mod:`~fastroof.backends.serve.answer`; what is asked in JSON is answered by
:mod:`~fastroof.backends.serve.messages`, whose forms :mod:`~fastroof.backends.serve.message_forms` lists.
"""
