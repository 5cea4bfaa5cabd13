//go:build !cgo

package main

func touch() bool { return true }
