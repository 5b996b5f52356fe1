"""An evaluator for chat templates in which every operation is metered and every character keeps its origin.

Jinja2 only parses. Its compiler turns a template into Python code, where a loop, a string product or a doubled
list runs unbounded unless the process is killed, which neither a thread on Windows nor a signal on any thread but
the first can do; and in compiled code a string loses the knowledge of where its characters came from. Walking
the syntax tree costs a few microseconds per node and gives both: limits that hit at the same place on every
machine, and prompts in which text supplied by a user can never become a control token.
"""
