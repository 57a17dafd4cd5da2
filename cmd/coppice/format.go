package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/coppice-dev/coppice/core"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// table writes aligned columns.
func table(w io.Writer, header string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, strings.ReplaceAll(header, " ", "\t"))
	for _, r := range rows {
		for i, cell := range r {
			r[i] = dash(visible(cell))
		}
		fmt.Fprintln(t, strings.Join(r, "\t"))
	}
	return t.Flush()
}

// facts writes "name  value" lines; an empty value leaves its line out.
func facts(w io.Writer, pairs ...string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			fmt.Fprintf(t, "%s\t%s\n", pairs[i], visible(pairs[i+1]))
		}
	}
	return t.Flush()
}

func dash(s string) string { return cmp.Or(s, "-") }

// short is how people name an id: its random end.
func short(id string) string { return core.Short(core.WorkspaceID(id)) }

// age is how long ago t was, in one unit.
func age(now, t time.Time) string {
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

// left is how long there is until t.
func left(now, t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return age(t, now)
}

// size is a number of bytes in the largest binary unit that leaves digits before the point.
func size(n int64) string {
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

func milliseconds(ms float64) string {
	switch {
	case ms >= 10_000:
		return fmt.Sprintf("%.1f s", ms/1000)
	case ms >= 100:
		return fmt.Sprintf("%.0f ms", ms)
	}
	return fmt.Sprintf("%.1f ms", ms)
}

// pairs shows a map as sorted key=value words.
func pairs[M ~map[string]V, V any](m M) string {
	var words []string
	for k, v := range m {
		words = append(words, fmt.Sprintf("%s=%v", k, v))
	}
	slices.Sort(words)
	return strings.Join(words, " ")
}

func timings(list coppice.Timings) string {
	var words []string
	for _, t := range list {
		words = append(words, t.Stage+" "+milliseconds(t.DurationMS))
	}
	return strings.Join(words, ", ")
}

func moment(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Local().Format(time.RFC3339)
}
