"""Serving: an OpenAI-compatible server around an engine (extra: serve), or around many (extra: ray).

Top down: `server` starts one process; `app` has the routes; `service` takes a request from its body (`protocol`) past the bounded
queue to tokens and back to text (`texts`); `tokens` is where an engine, here or elsewhere, is asked; `replies` are the bodies that
go back. `observer`, `metrics` and `request_log` watch; `limits` sends away what nothing should look at.

With Ray: `ray_app` is the same service before many engines, and `failover` what lets answers outlive them; `ray_batch` answers files,
line by line as `batch` does. `settings` is what both take.
"""
