"""Messages and tools for the rows of tests."""

U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "c1"}
