package dockerfile_test

import (
	"strconv"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller/builds/dockerfile"
	"github.com/coppice-dev/coppice/controller/builds/plan"
	"github.com/coppice-dev/coppice/core"
)

func TestPlan(t *testing.T) {
	t.Parallel()
	f, err := dockerfile.Parse(`# syntax=docker/dockerfile:1
ARG TAG=3.12
FROM python:${TAG}-slim AS app
ARG TAG
ARG EXTRA=none
ENV A=1 B="two words" C=$TAG
ENV PATH=/venv/bin:$PATH
WORKDIR /srv
WORKDIR app
RUN pip install \
    flask
RUN ["echo", "$A"]
RUN <<EOF
set -e
echo one
EOF
RUN cat <<X > /x
in $A
X
COPY --chown=app:app --chmod=755 a.txt b/* ./
COPY <<E /etc/motd
hello $C
E
ADD local.txt /opt/
USER app:app
EXPOSE 80 443/tcp
LABEL who=me
SHELL ["/bin/bash", "-c"]
RUN true
ENTRYPOINT ["serve"]
CMD ["--port", "80"]
`, map[string]string{"EXTRA": "given"}, "", "ctx")
	if err != nil {
		t.Fatal(err)
	}
	if f.From != "python:3.12-slim" {
		t.Errorf("from %q", f.From)
	}
	list, err := f.Plan(plan.Config{Env: map[string]string{"PATH": "/usr/bin", "BASE": "x"}})
	if err != nil {
		t.Fatal(err)
	}
	var runs []string
	var copies []plan.Copy
	for _, in := range list {
		if in.Command != nil {
			runs = append(runs, strings.Join(in.Command, "|"))
		}
		if in.Copy != nil {
			copies = append(copies, *in.Copy)
		}
	}
	want := []string{
		"/bin/sh|-c|pip install     flask", "echo|$A", "/bin/sh|-c|set -e\necho one\n", "/bin/sh|-c|cat <<X > /x\nin $A\nX", "/bin/bash|-c|true",
	}
	if strings.Join(runs, "\n---\n") != strings.Join(want, "\n---\n") {
		t.Errorf("commands %q, want %q", runs, want)
	}
	last := list[len(list)-1].Config
	if last.Env["PATH"] != "/venv/bin:/usr/bin" || last.Env["C"] != "3.12" || last.Env["B"] != "two words" || last.Env["BASE"] != "x" || last.Workdir != "/srv/app" || last.User != "app:app" ||
		strings.Join(last.Entrypoint, " ") != "serve" || strings.Join(last.Cmd, " ") != "--port 80" || len(last.ExposedPorts) != 2 || last.Labels["who"] != "me" {
		t.Errorf("%+v", last)
	}
	if c := copies[0]; c.Dest != "/srv/app" || !c.Dir || c.Owner != "app:app" || c.Mode != "755" || len(c.Sources) != 2 || c.Upload != "ctx" {
		t.Errorf("%+v", c)
	}
	if c := copies[1]; len(c.Inline) != 1 || c.Inline[0].Data != "hello 3.12\n" || c.Dest != "/etc/motd" {
		t.Errorf("%+v", c)
	}
	for _, in := range list {
		if strings.HasPrefix(in.Text, "RUN pip") && (in.Env["EXTRA"] != "given" || in.Env["A"] != "1" || in.Config.Workdir != "/srv/app" || in.Line != 10) {
			t.Errorf("%+v", in)
		}
	}
	if again, err := f.Plan(plan.Config{}); err != nil || !strings.HasPrefix(again[3].Config.Env["PATH"], "/venv/bin:/usr/local/sbin:") {
		t.Errorf("without a PATH: %+v, %v", again, err)
	}
}

// TestRefused: what is not carried out is refused by its line.
func TestRefused(t *testing.T) {
	t.Parallel()
	for text, says := range map[string]string{
		"":                            "no instructions",
		"RUN true":                    "line 1",
		"FROM a\nHEALTHCHECK CMD x":   "line 2: HEALTHCHECK is not supported",
		"FROM a\nVOLUME /x":           "line 2: VOLUME",
		"FROM a\nONBUILD RUN x":       "line 2: ONBUILD",
		"FROM a\nSTOPSIGNAL 9":        "line 2: STOPSIGNAL",
		"FROM a\n\nFROM b":            "line 3: it has 2 stages",
		"FROM a\nCOPY --from=b /x /y": "line 2: COPY --from",
		"FROM a\nRUN --mount=type=cache,target=/x x": "line 2: RUN --mount",
		"FROM a\nADD https://a.example/x /":          "line 2: ADD of a URL",
		"FROM a\nADD x.tar.gz /":                     "line 2: ADD of an archive",
		"FROM a\nCOPY a b":                           "line 2: COPY needs a context",
		"FROM a\nFROBNICATE x":                       "line 2",
		"FROM a\nENV A=${B:?missing}":                "line 2",
		"FROM --platform=linux/arm64 a":              "line 1: FROM --platform",
		"FROM $NOTHING":                              "names no image",
		"FROM a\nRUN <<EOF\n#!/usr/bin/python\nEOF":  "line 2: a here document with #!",
		"FROM a\nEXPOSE x":                           "line 2: EXPOSE",
	} {
		_, err := dockerfile.Parse(text, nil, "", "")
		if core.CodeOf(err) != core.CodeDockerfileInvalid || !strings.Contains(core.MessageOf(err), says) {
			t.Errorf("%q: %v, want %q", text, err, says)
		}
	}
}

func TestBounds(t *testing.T) {
	t.Parallel()
	growing := "FROM a\nENV A=" + strings.Repeat("x", 1000) + strings.Repeat("\nENV A=$A$A$A$A", 10)
	for name, text := range map[string]string{
		"a long one":        "FROM a\n" + strings.Repeat("# x\n", dockerfile.MaxBytes/4),
		"many instructions": "FROM a" + strings.Repeat("\nRUN x", 257),
		"growing variables": growing,
	} {
		if _, err := dockerfile.Parse(text, nil, "", ""); core.CodeOf(err) != core.CodeDockerfileInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzParse: no text ends as a fault.
func FuzzParse(f *testing.F) {
	f.Add("FROM a\nRUN <<EOF\nx\nEOF\nCOPY a b\nENV A=${B:-c}")
	f.Fuzz(func(t *testing.T, text string) {
		d, err := dockerfile.Parse(text, map[string]string{"A": "b"}, "", "ctx")
		if err != nil {
			if core.CategoryOf(err) != core.Invalid {
				t.Fatal(err)
			}
			return
		}
		if _, err := d.Plan(plan.Config{Env: map[string]string{"A": "$A"}}); err != nil && core.CategoryOf(err) != core.Invalid {
			t.Fatal(err)
		}
	})
}

// TestExpansionIsBounded: a small Dockerfile cannot ask for much memory or time.
func TestExpansionIsBounded(t *testing.T) {
	t.Parallel()
	long := map[string]string{"A": strings.Repeat("x", 64<<10)}
	for name, text := range map[string]string{
		"one word":          "FROM base\nARG A\nENV B=" + strings.Repeat("$A", 100_000),
		"words":             "FROM base\nARG A\nENV" + strings.Repeat(" B=$A", 40_000),
		"instructions":      "FROM base\nARG A\n" + strings.Repeat("LABEL a=$A$A$A\n", 200),
		"arguments of FROM": "ARG A\n" + strings.Repeat("ARG B=$A\n", 25_000) + "FROM base",
		"a replacement":     "FROM base\nARG A\nENV B=${A//x/" + strings.Repeat("y", 100_000) + "}",
		"replacements":      "FROM base\nENV A=xxxx B=${A//x/${A//x/y}}",
		"a long pattern":    "FROM base\nARG A\nENV B=${A#" + strings.Repeat("x", 100_000) + "*y}",
		"variables":         "FROM base\nENV" + manyWords(1001, "=1"),
		"arguments":         "FROM base\nARG" + manyWords(1001, "=1"),
		"bytes":             "FROM base\nARG A\nENV B=$A C=$A D=$A E=$A",
		"ports":             "FROM base\nEXPOSE" + manyWords(1001, ""),
		"sources":           "FROM base\nCOPY" + manyWords(257, "") + " /",
	} {
		if _, err := dockerfile.Parse(text, long, "", "ctx"); core.CodeOf(err) != core.CodeDockerfileInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	f, err := dockerfile.Parse("FROM base\nENV V=1.2.3 \nENV M=${V%.*} N=${V//./-}\nRUN true", nil, "", "")
	if err != nil {
		t.Fatal(err)
	}
	list, err := f.Plan(plan.Config{})
	if err != nil || list[1].Config.Env["M"] != "1.2" || list[1].Config.Env["N"] != "1-2-3" {
		t.Errorf("%+v, %v", list, err)
	}
}

func manyWords(n int, end string) string {
	var out strings.Builder
	for i := range n {
		_, _ = out.WriteString(" " + strconv.Itoa(i+1) + end)
	}
	return out.String()
}
