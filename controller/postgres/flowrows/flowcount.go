package flowrows

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// These bound the times that the clock of a host may give for counts. A flow beyond a bound is
// counted in the day at that bound. So a host cannot make a row for each minute of a thousand
// years.
const (
	countsBack  = 100 * 24 * time.Hour
	countsAhead = 10 * time.Minute // by minutes; later flows are counted by days, up to one day ahead
)

// countBucket is what one bound of rows is for.
type countBucket struct {
	Sandbox core.SandboxID
	Kind    flows.Kind
	Daily   bool
	From    int64 // Unix seconds
	Granted bool
}

// countKey is the key of a row of counts.
type countKey struct {
	countBucket
	Spoken core.Spoken
	Opaque bool
	Host   string
	Port   uint16
	Grant  string
}

// flowCount is a row of counts, or what is to be added to it.
type flowCount struct {
	Sandbox  core.SandboxID `json:"sandbox_id" db:"sandbox_id"`
	Kind     flows.Kind     `json:"kind" db:"kind"`
	Daily    bool           `json:"daily" db:"daily"`
	From     time.Time      `json:"from_at" db:"from_at"`
	Spoken   core.Spoken    `json:"spoken" db:"spoken"`
	Opaque   bool           `json:"opaque" db:"opaque"`
	Host     string         `json:"host" db:"host"`
	Port     uint16         `json:"port" db:"port"`
	Grant    string         `json:"grant_id" db:"grant_id"`
	First    time.Time      `json:"first_at" db:"first_at"`
	Last     time.Time      `json:"last_at" db:"last_at"`
	Rule     string         `json:"rule" db:"-"`
	Count    int64          `json:"count" db:"-"`
	Sent     int64          `json:"sent_bytes" db:"-"`
	Received int64          `json:"received_bytes" db:"-"`
}

func (c flowCount) key() countKey {
	return countKey{
		countBucket: countBucket{Sandbox: c.Sandbox, Kind: c.Kind, Daily: c.Daily, From: c.From.Unix(), Granted: c.Grant != ""},
		Spoken:      c.Spoken, Opaque: c.Opaque, Host: c.Host, Port: c.Port, Grant: c.Grant,
	}
}

// flowCounts are the counts that a batch adds to.
type flowCounts struct {
	now    time.Time
	there  map[countKey]flowCount // that were there before
	named  map[countBucket]int    // how many rows name a host and port, of there and added
	ruled  map[countBucket]int    // how many name a rule
	added  map[countKey]*flowCount
	hashes []int64 // of the flows that were counted
}

func newFlowCounts(now time.Time) *flowCounts {
	return &flowCounts{
		now: now, there: map[countKey]flowCount{}, named: map[countBucket]int{}, ruled: map[countBucket]int{}, added: map[countKey]*flowCount{},
	}
}

// fromOf returns the beginning of a flow's minute or day.
func (c *flowCounts) fromOf(at time.Time, daily bool) time.Time {
	if !daily {
		return at.UTC().Truncate(time.Minute)
	}
	day := 24 * time.Hour
	if at.Before(c.now.Add(-countsBack)) {
		at = c.now.Add(-countsBack)
	} else if at.After(c.now.Add(day)) {
		at = c.now.Add(day)
	}
	return at.UTC().Truncate(day)
}

// daily reports whether a flow of this time is counted by days.
func (c *flowCounts) daily(at time.Time) bool {
	return at.Before(c.now.Add(-flows.MinutesKept)) || at.After(c.now.Add(countsAhead))
}

// wanted is the row that a flow has as long as there is room for it.
func (c *flowCounts) wanted(f core.Flow, kind flows.Kind, daily bool) countKey {
	k := countKey{
		countBucket: countBucket{Sandbox: f.SandboxID, Kind: kind, Daily: daily, From: c.fromOf(f.At, daily).Unix(), Granted: f.Grant != ""},
		Spoken:      f.Spoken, Opaque: f.Method == "", Host: f.Host, Port: f.Port, Grant: f.Grant,
	}
	if f.Port == 0 { // it names no place, and must not be taken for one that does
		k.Host = ""
	}
	return k
}

// load takes what is there.
func (c *flowCounts) load(rows []flowCount) {
	for _, r := range rows {
		k := r.key()
		c.there[k] = r
		c.note(k)
	}
}

// note counts a new row towards the bounds of its bucket.
func (c *flowCounts) note(k countKey) {
	switch {
	case k.Port != 0:
		c.named[k.countBucket]++
	case k.Host != "":
		c.ruled[k.countBucket]++
	}
}

func (c *flowCounts) has(k countKey) bool {
	_, there := c.there[k]
	return there || c.added[k] != nil
}

// shared is the row that a flow shares with others when its bucket is full. A flow that had a grant is still counted under
// the rule that let it through.
func (c *flowCounts) shared(k countKey, rule string) countKey {
	k.Host, k.Port = "", 0
	if k.Grant == "" {
		return k
	}
	if k.Host = rule; c.has(k) || c.ruled[k.countBucket] < flows.CountsOfRules {
		return k
	}
	k.Host = ""
	return k
}

// resolve finds the row of a flow.
func (c *flowCounts) resolve(k countKey, rule string) countKey {
	most := flows.CountsOfMinute
	if k.Daily {
		most = flows.CountsOfDay
	}
	if c.has(k) || k.Port != 0 && c.named[k.countBucket] < most {
		return k
	}
	return c.shared(k, rule)
}

// found returns the row in which the beginning of a flow was counted, if one covers its time. Its minute may be part of a day by now.
func (c *flowCounts) found(f core.Flow, kind flows.Kind) (countKey, bool) {
	for _, daily := range []bool{false, true} {
		k := c.wanted(f, kind, daily)
		for _, k := range []countKey{k, c.shared(k, f.Rule)} {
			r, there := c.there[k]
			if there && !f.At.Before(r.First) && !f.At.After(r.Last) || c.added[k] != nil {
				return k, true
			}
		}
	}
	return countKey{}, false
}

// add counts a record: the beginning of a flow counts as one, its end adds the bytes. An end that says that nothing was sent takes
// the flow out of the count and counts it as denied.
func (c *flowCounts) add(f core.Flow) {
	kind := flows.KindOf(f)
	c.hashes = append(c.hashes, flowHash(f))
	if !isEnd(f) {
		c.addTo(c.wanted(f, kind, c.daily(f.At)), f, f.Flows())
		return
	}
	k, ok := c.found(f, kind)
	if !ok {
		k = c.wanted(f, kind, c.daily(f.At))
	}
	if f.Outcome != core.FlowDenied {
		c.addTo(k, f, 0)
		return
	}
	c.addTo(k, f, -1)
	c.addTo(c.wanted(f, flows.KindDenied, c.daily(f.At)), f, 1)
}

func (c *flowCounts) addTo(k countKey, f core.Flow, count int64) {
	k = c.resolve(k, f.Rule)
	last := f.At
	if f.Last.After(last) {
		last = f.Last
	}
	row := c.added[k]
	if row == nil {
		if !c.has(k) {
			c.note(k)
		}
		row = &flowCount{
			Sandbox: k.Sandbox, Kind: k.Kind, Daily: k.Daily, From: time.Unix(k.From, 0).UTC(), Spoken: k.Spoken, Opaque: k.Opaque, Host: k.Host, Port: k.Port,
			Grant: k.Grant, First: f.At, Last: last, Rule: f.Rule,
		}
		c.added[k] = row
	}
	row.Count, row.Sent, row.Received = row.Count+count, row.Sent+f.Sent, row.Received+f.Received
	if f.At.Before(row.First) {
		row.First = f.At
	}
	if last.After(row.Last) {
		row.Last = last
	}
}

// isEnd reports whether a record is the end of a flow whose beginning has a record, too.
func isEnd(f core.Flow) bool {
	return !f.Ended.IsZero() && flows.KindOf(f) != flows.KindDenied
}

// flowHash names a record.
func flowHash(f core.Flow) int64 {
	h := sha256.New()
	for _, s := range []string{string(f.SandboxID), f.ID, f.At.UTC().Format(time.RFC3339Nano)} {
		h.Write([]byte(s))
		h.Write([]byte{0})
	}
	if f.Final() {
		h.Write([]byte{1})
	}
	return int64(binary.BigEndian.Uint64(h.Sum(nil))) //nolint:gosec // any 64 bits do
}

// uncounted leaves out what one of the runner's last batches has added to counts, and what comes twice in this one. The lock makes
// one batch of a runner at a time look and count.
func (t *Tx) uncounted(ctx context.Context, runner core.RunnerID, list []core.Flow) ([]core.Flow, error) {
	hashes := make([]int64, len(list))
	for i, f := range list {
		hashes[i] = flowHash(f)
	}
	t.Soon(`SELECT pg_advisory_xact_lock(hashtextextended('flows of ' || @runner::text, 0))`, pgtx.Args{"runner": runner})
	rows, err := pgtx.Many[int64](ctx, t, `
		SELECT DISTINCT k.hash FROM flow_batches b CROSS JOIN LATERAL unnest(b.keys) AS k (hash) WHERE b.runner_id = @runner AND k.hash = ANY(@hashes::bigint[])`,
		pgtx.Args{"runner": runner, "hashes": hashes})
	if err != nil {
		return nil, err
	}
	seen := make(map[int64]bool, len(list))
	for _, r := range rows {
		seen[r] = true
	}
	fresh := make([]core.Flow, 0, len(list))
	for i, f := range list {
		if !seen[hashes[i]] {
			seen[hashes[i]] = true
			fresh = append(fresh, f)
		}
	}
	return fresh, nil
}

type countAt struct {
	Sandbox core.SandboxID `json:"sandbox_id"`
	Daily   bool           `json:"daily"`
	From    time.Time      `json:"from_at"`
}

// loadCounts reads the rows that a batch may add to.
func (t *Tx) loadCounts(ctx context.Context, list []core.Flow, c *flowCounts) error {
	asked := map[countAt]bool{}
	for _, f := range list {
		for _, daily := range []bool{false, true} {
			asked[countAt{Sandbox: f.SandboxID, Daily: daily, From: c.fromOf(f.At, daily)}] = true
		}
	}
	buckets := make([]countAt, 0, len(asked))
	for b := range asked {
		buckets = append(buckets, b)
	}
	rows, err := pgtx.Many[flowCount](ctx, t, `
		SELECT c.sandbox_id, c.kind, c.daily, c.from_at, c.spoken, c.opaque, c.host, c.port, c.grant_id, c.first_at, c.last_at
		FROM jsonb_to_recordset(@buckets::jsonb) AS v (sandbox_id text, daily boolean, from_at timestamptz)
		CROSS JOIN unnest(ARRAY['effect', 'read', 'denied']) AS k (kind)
		JOIN flow_counts c ON c.sandbox_id = v.sandbox_id AND c.kind = k.kind AND c.daily = v.daily AND c.from_at = v.from_at`, pgtx.Args{"buckets": buckets})
	c.load(rows)
	return err
}

// saveCounts adds to the rows, in one order, so that two batches never deadlock, and notes which flows were counted.
func (t *Tx) saveCounts(ctx context.Context, runner core.RunnerID, c *flowCounts) error {
	if len(c.hashes) == 0 {
		return nil
	}
	rows := make([]*flowCount, 0, len(c.added))
	for _, r := range c.added {
		rows = append(rows, r)
	}
	slices.SortFunc(rows, func(a, b *flowCount) int {
		return cmp.Or(cmp.Compare(a.Sandbox, b.Sandbox), cmp.Compare(a.Kind, b.Kind), a.From.Compare(b.From), cmp.Compare(a.Host, b.Host), cmp.Compare(a.Port, b.Port),
			cmp.Compare(a.Grant, b.Grant), cmp.Compare(a.Spoken, b.Spoken))
	})
	if _, err := t.Exec(ctx, `
		INSERT INTO flow_counts AS c (project_id, workspace_id, sandbox_id, epoch, kind, daily, from_at, spoken, opaque, host, port, grant_id, rule, count,
			sent_bytes, received_bytes, first_at, last_at)
		SELECT s.project_id, s.workspace_id, s.id, s.epoch, v.kind, v.daily, v.from_at, v.spoken, v.opaque, v.host, v.port, v.grant_id, v.rule, v.count,
			v.sent_bytes, v.received_bytes, v.first_at, v.last_at
		FROM jsonb_to_recordset(@rows::jsonb) AS v (sandbox_id text, kind text, daily boolean, from_at timestamptz, spoken text, opaque boolean, host text, port int,
			grant_id text, rule text, count bigint, sent_bytes bigint, received_bytes bigint, first_at timestamptz, last_at timestamptz)
		JOIN LATERAL (SELECT * FROM sandboxes x WHERE x.id = v.sandbox_id LIMIT 1) s ON s.runner_id = @runner
		ON CONFLICT ON CONSTRAINT flow_counts_pkey DO UPDATE SET count = least(c.count + excluded.count, 1::bigint << 61),
			sent_bytes = least(c.sent_bytes + excluded.sent_bytes, 1::bigint << 61), received_bytes = least(c.received_bytes + excluded.received_bytes, 1::bigint << 61),
			first_at = least(c.first_at, excluded.first_at), last_at = greatest(c.last_at, excluded.last_at)`, pgtx.Args{"rows": rows, "runner": runner}); err != nil {
		return err
	}
	t.Soon(`INSERT INTO flow_batches (runner_id, keys) VALUES (@runner, @keys)`, pgtx.Args{"runner": runner, "keys": c.hashes})
	t.Soon(`
		DELETE FROM flow_batches WHERE runner_id = @runner AND id <= (SELECT b.id FROM flow_batches b WHERE b.runner_id = @runner ORDER BY b.id DESC OFFSET @most LIMIT 1)`,
		pgtx.Args{"runner": runner, "most": flows.CountedBatches})
	return nil
}

// FoldFlowCounts adds minutes to days. A day has more room for hosts than a minute; what does not fit shares a row as in a minute.
func (t *Tx) FoldFlowCounts(ctx context.Context, limit int) (int, error) {
	return pgtx.One[int](ctx, t, nil, `
		WITH old AS (
			DELETE FROM flow_counts WHERE ctid = ANY(ARRAY(
				SELECT ctid FROM flow_counts WHERE NOT daily AND from_at < now() - make_interval(secs => @kept) ORDER BY from_at LIMIT @limit FOR UPDATE SKIP LOCKED))
			RETURNING *
		), sums AS (
			SELECT project_id, workspace_id, sandbox_id, epoch, kind, date_trunc('day', from_at, 'UTC') AS day, spoken, opaque, host, port, grant_id, min(rule) AS rule,
				least(sum(count), 1::bigint << 61)::bigint AS count, least(sum(sent_bytes), 1::bigint << 61)::bigint AS sent_bytes,
				least(sum(received_bytes), 1::bigint << 61)::bigint AS received_bytes, min(first_at) AS first_at, max(last_at) AS last_at
			FROM old GROUP BY project_id, workspace_id, sandbox_id, epoch, kind, day, spoken, opaque, host, port, grant_id
		), known AS (
			SELECT s.*, EXISTS (SELECT FROM flow_counts d WHERE d.sandbox_id = s.sandbox_id AND d.kind = s.kind AND d.daily AND d.from_at = s.day AND d.spoken = s.spoken
					AND d.opaque = s.opaque AND d.host = s.host AND d.port = s.port AND d.grant_id = s.grant_id) AS there,
				(SELECT count(*) FROM flow_counts d WHERE d.sandbox_id = s.sandbox_id AND d.kind = s.kind AND d.daily AND d.from_at = s.day AND d.port <> 0
					AND (d.grant_id <> '') = (s.grant_id <> '')) AS named,
				(SELECT count(*) FROM flow_counts d WHERE d.sandbox_id = s.sandbox_id AND d.kind = s.kind AND d.daily AND d.from_at = s.day AND d.port = 0 AND d.host <> ''
					AND d.grant_id <> '') AS ruled
			FROM sums s
		), ranked AS (
			SELECT k.*, k.there OR k.port = 0
				OR k.named + row_number() OVER (PARTITION BY k.sandbox_id, k.kind, k.day, k.grant_id <> '', k.there OR k.port = 0 ORDER BY k.first_at, k.host, k.port) <= @most AS fits
			FROM known k
		), shared AS (
			SELECT r.*, CASE WHEN r.fits THEN r.host WHEN r.grant_id <> '' THEN r.rule ELSE '' END AS to_host, CASE WHEN r.fits THEN r.port ELSE 0 END AS to_port
			FROM ranked r
		), bounded AS (
			SELECT s.*, s.to_port = 0 AND s.to_host <> '' AND NOT s.there
				AND s.ruled + dense_rank() OVER (PARTITION BY s.sandbox_id, s.kind, s.day, s.to_port = 0 AND s.to_host <> '' AND NOT s.there ORDER BY s.to_host, s.grant_id) > @rules AS crowded
			FROM shared s
		), saved AS (
			INSERT INTO flow_counts AS c (project_id, workspace_id, sandbox_id, epoch, kind, daily, from_at, spoken, opaque, host, port, grant_id, rule, count,
				sent_bytes, received_bytes, first_at, last_at)
			SELECT project_id, workspace_id, sandbox_id, epoch, kind, true, day, spoken, opaque, CASE WHEN crowded THEN '' ELSE to_host END AS at_host, to_port, grant_id, min(rule),
				least(sum(count), 1::bigint << 61), least(sum(sent_bytes), 1::bigint << 61), least(sum(received_bytes), 1::bigint << 61), min(first_at), max(last_at)
			FROM bounded GROUP BY project_id, workspace_id, sandbox_id, epoch, kind, day, spoken, opaque, at_host, to_port, grant_id
			ORDER BY sandbox_id, kind, day, at_host, to_port, grant_id, spoken
			ON CONFLICT ON CONSTRAINT flow_counts_pkey DO UPDATE SET count = least(c.count + excluded.count, 1::bigint << 61),
				sent_bytes = least(c.sent_bytes + excluded.sent_bytes, 1::bigint << 61), received_bytes = least(c.received_bytes + excluded.received_bytes, 1::bigint << 61),
				first_at = least(c.first_at, excluded.first_at), last_at = greatest(c.last_at, excluded.last_at)
		)
		SELECT count(*) FROM old`,
		pgtx.Args{"kept": flows.MinutesKept.Seconds(), "limit": limit, "most": flows.CountsOfDay, "rules": flows.CountsOfRules})
}

// TidyFlowCounts removes days that are too old, and the notes of batches that are older than a day.
func (t *Tx) TidyFlowCounts(ctx context.Context, keep time.Duration, limit int) (int, error) {
	days, err := t.Exec(ctx, `
		DELETE FROM flow_counts WHERE ctid = ANY(ARRAY(
			SELECT ctid FROM flow_counts WHERE daily AND from_at + interval '1 day' <= now() - make_interval(secs => @keep) ORDER BY from_at LIMIT @limit FOR UPDATE SKIP LOCKED))`,
		pgtx.Args{"keep": keep.Seconds(), "limit": limit})
	if err != nil {
		return 0, err
	}
	batches, err := t.Exec(ctx, `
		DELETE FROM flow_batches WHERE id = ANY(ARRAY(SELECT id FROM flow_batches WHERE created_at < now() - interval '1 day' ORDER BY created_at LIMIT @limit FOR UPDATE SKIP LOCKED))`,
		pgtx.Args{"limit": limit})
	return int(max(days, batches)), err
}
