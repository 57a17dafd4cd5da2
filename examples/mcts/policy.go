package main

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"strings"
)

// Action is something to do in a machine: a shell command that ends by printing an Observation. A command that ends
// with another status than 0 did not apply; whatever it did stays in a fork that is thrown away.
type Action struct {
	Name    string   `json:"name"`
	Title   string   `json:"title"`
	Command []string `json:"-"`
	Prior   float64  `json:"prior"` // the higher, the earlier it is tried
}

// Observation is what a machine says after an action.
type Observation struct {
	Passed    int      `json:"passed"`
	Total     int      `json:"total"`
	Failed    []string `json:"failed"`
	Regressed []string `json:"regressed"` // of Failed, those that passed at the root
	Journal   []string `json:"journal"`   // what this machine has done since the root, known to its memory only
	LoadsLeft int      `json:"loads_left"`
	Stale     []string `json:"stale"` // modules that still use an older version of another
	State     string   `json:"state"` // equal states have equal observations
	Nonce     string   `json:"nonce"` // of the bench's process, drawn when it started
	PID       int      `json:"pid"`
	Identity  Identity `json:"identity"`
}

// Identity is what two forks must not share.
type Identity struct {
	Random    string `json:"random"` // drawn from the kernel for this observation
	MachineID string `json:"machine_id"`
	Hostname  string `json:"hostname"`
	MAC       string `json:"mac"`
	IP        string `json:"ip"`
}

// Share is the share of tests that pass: the reward.
func (o *Observation) Share() float64 {
	if o.Total == 0 {
		return 0
	}
	return float64(o.Passed) / float64(o.Total)
}

// Policy proposes what to try next in a machine, best first. A language model would be one.
type Policy interface {
	Propose(o Observation) []Action
}

// Edits is a policy over a fixed list of candidate actions. It prefers those that name something a failing test names,
// and otherwise guesses.
type Edits struct {
	Candidates []Action
	Random     *rand.Rand
}

// Propose returns the candidates that this machine has not done yet.
func (e *Edits) Propose(o Observation) []Action {
	var out []Action
	if o.LoadsLeft == 0 {
		return nil
	}
	for _, a := range e.Candidates {
		if slices.Contains(o.Journal, a.Name) && a.Name != reloadRecipes {
			continue
		}
		a.Prior = relevance(a, o)
		out = append(out, a)
	}
	e.Random.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	slices.SortStableFunc(out, func(a, b Action) int { return cmp.Compare(b.Prior, a.Prior) })
	return out
}

// relevance is 1 for an action whose subject, the first word of its title, is part of a failing test's name.
func relevance(a Action, o Observation) float64 {
	if a.Name == reloadRecipes {
		return float64(min(len(o.Stale), 1))
	}
	subject, _, _ := strings.Cut(a.Title, ":")
	for _, test := range o.Failed {
		if strings.Contains(test[strings.LastIndexByte(test, '.')+1:], subject) {
			return 1
		}
	}
	return 0
}
