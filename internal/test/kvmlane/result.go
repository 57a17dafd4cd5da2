package main

import (
	"bytes"
	"fmt"
	"io"
	"regexp"
	"strings"
	"time"
)

// result is what came of a suite.
type result struct {
	name                    string
	passed, failed, skipped []string // tests that have no subtests of their own
	took                    time.Duration
	// why it is not well although no test failed; empty when it is.
	why string
	// notGiven says that it needs something that nobody gave: neither well nor a failure.
	notGiven string
}

func (r result) ok() bool { return r.notGiven == "" && r.why == "" && len(r.failed) == 0 }

// ended sets why from what the test binary ended with.
func (r *result) ended(status int, err error) {
	switch {
	case err != nil:
		r.why = err.Error()
	case status != 0 && len(r.failed) == 0:
		r.why = fmt.Sprintf("exit status %d, and no test says why", status)
	case status == 0 && len(r.passed) == 0:
		r.why = "no test passed"
	}
}

// String is the suite's line of the summary.
func (r result) String() string {
	var b strings.Builder
	switch {
	case r.notGiven != "":
		return fmt.Sprintf("%-32s NOT RUN  %s", r.name, r.notGiven)
	case r.ok():
		fmt.Fprintf(&b, "%-32s ok       ", r.name)
	default:
		fmt.Fprintf(&b, "%-32s FAILED   ", r.name)
	}
	fmt.Fprintf(&b, "%4.0f s  %d passed", r.took.Seconds(), len(r.passed))
	if len(r.skipped) > 0 {
		fmt.Fprintf(&b, ", %d skipped (%s)", len(r.skipped), strings.Join(r.skipped, " "))
	}
	if len(r.failed) > 0 {
		fmt.Fprintf(&b, ", %d failed (%s)", len(r.failed), strings.Join(r.failed, " "))
	}
	if r.why != "" {
		fmt.Fprintf(&b, ": %s", r.why)
	}
	return b.String()
}

// testLine is how a test binary with -test.v says what came of a test.
var testLine = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): (\S+) \(\d`)

// scanner passes a test binary's output on and keeps what it says of tests.
type scanner struct {
	out  io.Writer
	into *result
	line []byte
}

func (s *scanner) Write(p []byte) (int, error) {
	s.line = append(s.line, p...)
	for {
		line, rest, ok := bytes.Cut(s.line, []byte{'\n'})
		if !ok {
			break
		}
		s.take(string(line))
		s.line = rest
	}
	return s.out.Write(p)
}

// take keeps the outcome of a test. A parent is reported before its subtests, and says nothing that they do not: but for one
// that failed, only the last level counts.
func (s *scanner) take(line string) {
	m := testLine.FindStringSubmatch(line)
	if m == nil {
		return
	}
	list := map[string]*[]string{"PASS": &s.into.passed, "FAIL": &s.into.failed, "SKIP": &s.into.skipped}[m[1]]
	if n := len(*list); n > 0 && strings.HasPrefix(m[2], (*list)[n-1]+"/") {
		(*list)[n-1] = m[2]
		return
	}
	*list = append(*list, m[2])
}
