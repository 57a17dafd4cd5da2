// Package render shows results to people: tables, facts, ages, sizes and times.
package render

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Table writes aligned columns.
func Table(w io.Writer, header string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, strings.ReplaceAll(header, " ", "\t"))
	for _, r := range rows {
		for i, cell := range r {
			r[i] = Dash(foreign.Visible(cell))
		}
		fmt.Fprintln(t, strings.Join(r, "\t"))
	}
	return t.Flush()
}

// TableWithNotes is Table with a text below each row, indented. It is for texts that no column of a terminal has room for.
func TableWithNotes(w io.Writer, header string, rows [][]string, notes []string) error {
	var b bytes.Buffer
	if err := Table(&b, header, rows); err != nil {
		return err
	}
	first, lines, _ := strings.Cut(b.String(), "\n")
	_, err := fmt.Fprintln(w, first)
	i := 0
	for line := range strings.Lines(lines) { // one of each row, because Table leaves no line break in a cell
		if err == nil {
			_, err = io.WriteString(w, line)
		}
		if err == nil && i < len(notes) && notes[i] != "" {
			_, err = fmt.Fprintf(w, "  %s\n", foreign.Visible(notes[i]))
		}
		i++
	}
	return err
}

// Facts writes "name  value" lines; an empty value leaves its line out.
func Facts(w io.Writer, pairs ...string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			fmt.Fprintf(t, "%s\t%s\n", pairs[i], foreign.Visible(pairs[i+1]))
		}
	}
	return t.Flush()
}

// Lines writes text of several lines under a title, indented, so that none of them looks like a fact. Without text it writes nothing.
func Lines(w io.Writer, title, text string) error {
	if text == "" {
		return nil
	}
	_, err := fmt.Fprintf(w, "%s\n", title)
	for line := range strings.SplitSeq(text, "\n") {
		if err == nil {
			_, err = fmt.Fprintf(w, "  %s\n", foreign.Visible(line))
		}
	}
	return err
}

// Dash shows "-" in place of an empty text.
func Dash(s string) string { return cmp.Or(s, "-") }

// Short is the short form of an id: its random end.
func Short(id string) string { return core.Short(core.WorkspaceID(id)) }

// Age is how long ago t was, in one unit.
func Age(now, t time.Time) string {
	if t.IsZero() {
		return ""
	}
	d := now.Sub(t)
	switch {
	case d < 0:
		return "0s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// Left is how long there is until t.
func Left(now, t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return Age(t, now)
}

// Size is a number of bytes in the largest binary unit that leaves digits before the point.
func Size(n int64) string {
	const units = "KMGTP"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, u := float64(n)/1024, 0
	for v >= 1024 && u < len(units)-1 {
		v, u = v/1024, u+1
	}
	return fmt.Sprintf("%.1f %ciB", v, units[u])
}

// Milliseconds shows a time in milliseconds or seconds.
func Milliseconds(ms float64) string {
	switch {
	case ms >= 10_000:
		return fmt.Sprintf("%.1f s", ms/1000)
	case ms >= 100:
		return fmt.Sprintf("%.0f ms", ms)
	}
	return fmt.Sprintf("%.1f ms", ms)
}

// Pairs shows a map as sorted key=value words.
func Pairs[M ~map[string]V, V any](m M) string {
	var words []string
	for k, v := range m {
		words = append(words, fmt.Sprintf("%s=%v", k, v))
	}
	slices.Sort(words)
	return strings.Join(words, " ")
}

// Timings shows stages and their times in one line.
func Timings(list coppice.Timings) string {
	var words []string
	for _, t := range list {
		words = append(words, t.Stage+" "+Milliseconds(t.DurationMS))
	}
	return strings.Join(words, ", ")
}

// Slowest shows the slowest of the stages, at most n of them, in their order, so that a line of a table fits a terminal.
func Slowest(list coppice.Timings, n int) string {
	if len(list) <= n {
		return Timings(list)
	}
	byTime := slices.Clone(list)
	slices.SortStableFunc(byTime, func(a, b coppice.Timing) int { return cmp.Compare(b.DurationMS, a.DurationMS) })
	least := byTime[n-1].DurationMS
	var kept coppice.Timings
	for _, t := range list {
		if t.DurationMS >= least && len(kept) < n {
			kept = append(kept, t)
		}
	}
	return Timings(kept) + ", …"
}

// Moment shows a time in this machine's zone.
func Moment(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Local().Format(time.RFC3339)
}
