package arrakis

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestReadFiles(t *testing.T) {
	t.Parallel()
	file := `{"path":"a","content":"b"}`
	for body, want := range map[string]int{
		`{"files":[` + file + `]}`: 1,
		` {"other":{"files":[1]},"files":[` + file + `,{"path":"c"}],"more":null} `:       2,
		`{"files":[` + strings.TrimSuffix(strings.Repeat(file+",", maxFiles), ",") + `]}`: maxFiles,
		`{"files":[` + strings.Repeat(file+",", maxFiles) + file + `]}`:                   -1,
		`{"files":[` + strings.Repeat("0,", 1<<20) + `0]}`:                                -1,
		`{"files":[` + strings.Repeat("{},", 1<<18) + `{}]}`:                              -1,
		`{"files":[` + file: -1, `{"files":[]}`: -1, `{"files":{}}`: -1, `{"files":null}`: -1, `[]`: -1, ``: -1, `null`: -1, `{}`: -1,
		`{"files":[` + file + `]}{}`: -1, `{"files":[` + file + `],}`: -1, `{"files":[` + file + `]`: -1,
	} {
		files, err := readFiles([]byte(body))
		if got := len(files); err == nil && got != want || err != nil && want >= 0 {
			t.Errorf("%.60s: %d files, %v; want %d", body, got, err, want)
		}
	}
}

// TestEscaped: the length of a text as JSON is never more than what is counted.
func TestEscaped(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "plain <b> & text", "\x00\x01\n\t\x1f", "\xff\xfe", `"\\`, "\u2028\u2029 ü 😀", "\x7f"} {
		var b strings.Builder
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(false)
		if err := e.Encode(text); err != nil {
			t.Fatal(err)
		}
		if is := b.Len() - len("\"\"\n"); is > escaped(text) || escaped(text) > 6*len(text) {
			t.Errorf("%q: %d bytes are counted, there are %d", text, escaped(text), is)
		}
	}
}
