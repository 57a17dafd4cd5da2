-- Only for tests: production schemas go forward.
DROP SCHEMA river CASCADE;
