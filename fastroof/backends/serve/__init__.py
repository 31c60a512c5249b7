"""Plans served to other processes: on a pipe, or over Arrow Flight.

:mod:`~fastroof.backends.serve.stdio` answers on standard input and output, in the forms of
:mod:`~fastroof.backends.serve.frames` and :mod:`~fastroof.backends.serve.json_lines`;
:class:`~fastroof.backends.serve.client.StdioClient` asks. :mod:`~fastroof.backends.serve.flight` answers
over Arrow Flight, in record batches of steps. Both ask the plans of
:mod:`~fastroof.backends.serve.answer`; what is asked in JSON is answered by
:mod:`~fastroof.backends.serve.messages`, whose forms :mod:`~fastroof.backends.serve.message_forms` lists.
"""
