package guestapi

import (
	"net/url"
	"slices"
	"strings"
)

// What an agent can beyond the first agents. An agent in an old checkpoint stays as old as the checkpoint, so a host asks
// for the features before it relies on them.
const (
	FeatureFileWork = "file_work" // work on files as a user, in place, of whole trees, with extended attributes
	FeatureWatch    = "watch"     // watches of directories

	FeatureSignalTarget = "signal_target" // signals to other processes than those in the foreground
	FeatureFromNow      = "from_now"      // output from the time of the request on
	FeatureDeadline     = "deadline"      // a new deadline for a session that runs

	FeatureProvisional = "provisional_reseal" // a reseal after which the guest can be resealed again, see ResealRequest
	FeatureMark        = "mark"               // marks, which tell whether a command has left the machine unchanged
)

// Features are the features of the agents of this version.
func Features() []string {
	return []string{FeatureFileWork, FeatureWatch, FeatureSignalTarget, FeatureFromNow, FeatureDeadline, FeatureProvisional, FeatureMark}
}

// ParamNeed is the query parameter with a feature that the body of a request relies on.
const ParamNeed = "need"

// fileWork are the parameters of PathFiles that FeatureFileWork has brought.
var fileWork = []string{"user", "in_place", "offset", "append", "depth", "xattrs", "follow"}

// Needs returns the features that a public request relies on.
func Needs(path string, query url.Values) []string {
	need := slices.Clone(query[ParamNeed])
	if strings.HasPrefix(path, PathFiles+"/") || path == PathFiles && slices.ContainsFunc(fileWork, query.Has) {
		need = append(need, FeatureFileWork)
	}
	if strings.HasPrefix(path, PathSessions+"/") {
		if query.Has("from") {
			need = append(need, FeatureFromNow)
		}
		if strings.HasSuffix(path, "/deadline") {
			need = append(need, FeatureDeadline)
		}
	}
	if strings.HasPrefix(path, PathWatches) {
		need = append(need, FeatureWatch)
	}
	if path == PathMark {
		need = append(need, FeatureMark)
	}
	return need
}
