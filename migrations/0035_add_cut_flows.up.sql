-- A flow that the proxy ended after something of it was sent is cut, not denied (docs/adr/0037-the-journal-of-what-left.md).
ALTER TABLE flows
    DROP CONSTRAINT flows_outcome_check,
    ADD CONSTRAINT flows_outcome_check CHECK (outcome IN ('allowed', 'denied', 'cut', 'failed'));
