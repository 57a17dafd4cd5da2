-- A sweep works in small parts along indexes, and rows in a default partition do not block the partition of their month.

-- What a sweep may stop showing: deleted and still shown. Most deleted checkpoints leave this index soon.
CREATE INDEX checkpoints_unpruned_idx ON checkpoints (id) WHERE state = 'deleted' AND NOT pruned;
-- What stops it: a child that is shown, a living workspace on top. A node may have a million that have ended.
CREATE INDEX checkpoints_shown_child_idx ON checkpoints (parent_id) WHERE NOT pruned AND state <> 'failed';
CREATE INDEX workspaces_live_checkpoint_idx ON workspaces (checkpoint_id) WHERE ended_at IS NULL;

-- Makes the partitions of this month and the next two of one table (events: of this day and the next two). Rows may be in the
-- default partition, because nobody has called for a long time or because of a clock that is wrong. A partition cannot be made
-- while its rows are there. So this moves some of them, oldest first, into the partition, which reaches from the beginning of its
-- month up to the first row that is still in the default partition. The next call goes on from there. Readers always see all rows.
-- It returns how many rows it has moved; call it until that is 0. What is older than keep stays in the default partition: it
-- blocks nothing, and no clock can make it create a partition for each month of a thousand years. The owner alone may take the
-- trigger off, for the length of this transaction and under a lock that keeps all others out.
CREATE FUNCTION coppice_make_partitions_of(parent text, keep interval, batch integer) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, public, pg_temp SET lock_timeout = '500ms' SET timezone = 'UTC' AS $$
DECLARE
    col     text := CASE WHEN parent = 'flows' THEN 'at' ELSE 'created_at' END;
    unit    text := CASE WHEN parent = 'events' THEN 'day' ELSE 'month' END;
    form    text := CASE WHEN parent = 'events' THEN 'YYYYMMDD' ELSE 'YYYYMM' END;
    step    interval := ('1 ' || CASE WHEN parent = 'events' THEN 'day' ELSE 'month' END)::interval;
    rest    text := parent || '_default';
    part    text;
    lower_at timestamptz; -- of the month
    upper_at timestamptz;
    oldest  timestamptz;
    cut     timestamptz;
    taken   boolean;
    moved   bigint;
BEGIN
    IF parent IS NULL OR parent NOT IN ('reseal_reports', 'usage_samples', 'audit_records', 'attestations', 'flows', 'events') THEN
        RAISE EXCEPTION '% is no table with partitions', parent;
    END IF;
    IF keep IS NULL OR batch IS NULL OR batch < 1 THEN
        RAISE EXCEPTION 'at least one row is moved at a time';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('coppice_tidy_' || parent)); -- the functions of that name make partitions, too
    FOR i IN 0..2 LOOP
        lower_at := date_trunc(unit, now()) + i * step;
        part := parent || '_' || to_char(lower_at, form);
        IF to_regclass('public.' || part) IS NULL THEN
            EXECUTE format('SELECT EXISTS (SELECT FROM public.%I WHERE %I >= $1 AND %I < $2)', rest, col, col) INTO taken USING lower_at, lower_at + step;
            IF NOT taken THEN
                BEGIN
                    EXECUTE format('CREATE TABLE public.%I PARTITION OF public.%I FOR VALUES FROM (%L) TO (%L)', part, parent, lower_at::text, (lower_at + step)::text);
                EXCEPTION WHEN check_violation THEN NULL; -- a row came meanwhile
                END;
            END IF;
        END IF;
    END LOOP;

    EXECUTE format('SELECT min(%I) FROM public.%I WHERE %I >= $1 AND %I < $2', col, rest, col, col)
        INTO oldest USING date_trunc(unit, now() - keep), date_trunc(unit, now()) + 3 * step;
    IF oldest IS NULL THEN
        RETURN 0;
    END IF;
    -- Nobody writes or reads from here on.
    EXECUTE format('LOCK TABLE public.%I IN ACCESS EXCLUSIVE MODE', parent);
    lower_at := date_trunc(unit, oldest);
    upper_at := lower_at + step;
    part := parent || '_' || to_char(lower_at, form);
    EXECUTE format('SELECT %I FROM public.%I WHERE %I >= $1 AND %I < $2 ORDER BY %I OFFSET $3 LIMIT 1', col, rest, col, col, col)
        INTO cut USING lower_at, upper_at, batch;
    IF cut IS NULL THEN
        cut := upper_at;
    ELSIF cut = oldest THEN -- so many rows have one time, and go together
        cut := least(cut + interval '1 microsecond', upper_at);
    END IF;
    IF to_regclass('public.' || part) IS NULL THEN
        EXECUTE format('CREATE TABLE public.%I (LIKE public.%I INCLUDING ALL EXCLUDING IDENTITY)', part, parent);
    ELSE
        EXECUTE format('ALTER TABLE public.%I DETACH PARTITION public.%I', parent, part);
    END IF;
    EXECUTE format('ALTER TABLE public.%I DISABLE TRIGGER USER', rest);
    EXECUTE format('WITH gone AS (DELETE FROM public.%I WHERE %I >= $1 AND %I < $2 RETURNING *) INSERT INTO public.%I SELECT * FROM gone', rest, col, col, part)
        USING lower_at, cut;
    GET DIAGNOSTICS moved = ROW_COUNT;
    EXECUTE format('ALTER TABLE public.%I ENABLE TRIGGER USER', rest);
    EXECUTE format('ALTER TABLE public.%I ATTACH PARTITION public.%I FOR VALUES FROM (%L) TO (%L)', parent, part, lower_at::text, cut::text);
    RETURN moved;
END
$$;
REVOKE EXECUTE ON FUNCTION coppice_make_partitions_of(text, interval, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION coppice_make_partitions_of(text, interval, integer) TO coppice_app;
