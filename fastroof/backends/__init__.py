"""Plans as the backend of other programs: compiled callers, C, simulators, processes on the other end of a pipe.

Each adapter is a module or folder of its own and imports its client only when it is used.
"""
