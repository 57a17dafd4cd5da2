// Command searcher is the searcher in Go of the test in which a Go and a Python program search one tree: test_search_live.py.
//
// It reads one line of JSON from standard input, begins to search at once, and prints what it has found as one line of JSON.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
	"github.com/coppice-dev/coppice/sdk/go/search"
)

// task is what to search: words, by the letters that they are made of. A file of the machine holds the word so far.
type task struct {
	URL, Token string
	Root       string
	Name       string // of the search
	File       string
	Letters    string
	Target     string
	Budget     int
}

// answer is what came out.
type answer struct {
	End   search.End `json:"end"`
	Tried int        `json:"tried"`
	Best  string     `json:"best"`
}

func main() {
	if err := run(context.Background(), os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "searcher:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, in io.Reader, out io.Writer) error {
	var t task
	if err := json.NewDecoder(in).Decode(&t); err != nil {
		return err
	}
	client, err := coppice.New(coppice.Config{Server: t.URL, Token: t.Token})
	if err != nil {
		return err
	}
	defer client.Close()
	forks := &search.Forks{Checkpoints: search.Checkpoints{Client: client, Name: t.Name}, Propose: t.propose, Act: t.act(client)}
	s, err := search.New(search.Config{
		Root: t.Root, Problem: forks, Store: forks, Strategy: search.UCT{C: 0.5}, RootValue: new(0.0), Parallel: 2, Budget: t.Budget,
		Searcher: "go", Poll: 50 * time.Millisecond,
	})
	if err != nil {
		return err
	}
	r, err := s.Run(ctx)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(answer{r.End, r.Tried, strings.Join(r.Best.Path(), "")})
}

func (t task) propose(_ context.Context, n *search.Node) ([]search.Action, error) {
	if n.Depth == len(t.Target) {
		return nil, nil
	}
	var out []search.Action
	for l := range strings.SplitSeq(t.Letters, "") {
		out = append(out, search.Action{Name: l, Data: []byte(`{"letter":"` + l + `"}`)})
	}
	return out, nil
}

// act adds the letter to the word. Its value is how much of the target the word begins with.
func (t task) act(client *coppice.Client) func(context.Context, coppice.Workspace, search.Action) (search.Outcome, error) {
	return func(ctx context.Context, ws coppice.Workspace, a search.Action) (search.Outcome, error) {
		res, err := client.Exec(ctx, ws.ID, coppice.ExecRequest{Command: []string{"cat", t.File}})
		if err != nil {
			return search.Outcome{}, err
		}
		var data struct{ Letter string }
		if err := json.Unmarshal(a.Data, &data); err != nil {
			return search.Outcome{}, err
		}
		word := res.Stdout + data.Letter
		_, err = client.WriteFile(ctx, ws.ID, t.File, strings.NewReader(word), coppice.WriteOptions{})
		same := 0
		for same < min(len(word), len(t.Target)) && word[same] == t.Target[same] {
			same++
		}
		return search.Outcome{
			Value: float64(same) / float64(len(t.Target)), Terminal: len(word) == len(t.Target), Data: []byte(`{"word":"` + word + `","by":"go"}`),
		}, err
	}
}
