// Package answer has what every part of the agent needs to answer a request: reading parameters and
// bodies, writing answers, and the errors of paths. It owns no route and no state.
package answer
