DROP TABLE imports;
DROP FUNCTION coppice_abandon_import();
DROP TRIGGER checkpoints_imported_immutable ON checkpoints;
ALTER TABLE checkpoints
    DROP CONSTRAINT checkpoints_imported_check, DROP CONSTRAINT checkpoints_user_check, DROP CONSTRAINT checkpoints_captured_check,
    ADD CONSTRAINT checkpoints_user_check CHECK (kind <> 'user' OR (parent_id IS NOT NULL AND workspace_id IS NOT NULL AND workspace_epoch IS NOT NULL)) NOT VALID,
    ADD CONSTRAINT checkpoints_captured_check CHECK (state NOT IN ('captured', 'sealed') OR (captured_at IS NOT NULL AND runner_id IS NOT NULL AND runner_class IS NOT NULL AND class_key IS NOT NULL AND base_id IS NOT NULL)) NOT VALID,
    DROP COLUMN imported;
