"""Open requests, from `RequestTable.open` to the end of their responses.

table.py          opens, aborts, releases and settles them; request.py and prompt_request.py have their state
submit.py         the message `Submit` of a new one; stage_sender.py sends it, and what ends it
results.py        what the stages send about them
recovery.py       submits them again when a stage has died
deadlines.py      when they end at the latest; late_stages.py fails those that wait for a stage that hangs
abort_ids.py      finds them by the ids that abort them
rejections.py     counts those that are not opened; request_errors.py has the errors of those that fail
timings.py        how long each took
"""
