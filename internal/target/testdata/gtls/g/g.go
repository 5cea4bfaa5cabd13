// Package g reads the current goroutine's pointer in two ways.
package g

// Current returns g by the program's own relocation.
func Current() uintptr

// At returns the word at an offset from the thread's FS base.
func At(offset int64) uintptr
