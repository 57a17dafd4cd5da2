// Package pace owns waits that end with a context: a pause, and a loop with an interval.
package pace
