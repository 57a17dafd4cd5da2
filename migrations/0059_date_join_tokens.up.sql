-- A join token is good in the history of the database (0047_number_events_by_history) that it was made in, and in no later one. A failover that
-- loses commits can lose that a token was spent: it would work a second time, and two hosts would have one identity. Tokens that are there keep on.
ALTER TABLE runner_tokens ADD COLUMN history bigint NOT NULL DEFAULT coppice_event_history();
