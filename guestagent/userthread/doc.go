// Package userthread runs functions on threads that have the identity of a user and no capability,
// so that the kernel checks everything that they do. It bounds the number of these threads.
package userthread
