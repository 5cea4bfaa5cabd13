//go:generate go run gen.go

// Package syscalls names the system calls of Linux.
package syscalls

import "strconv"

// Name returns the name of a system call of this machine's architecture, and
// "syscall_N" for one that is newer than the table.
func Name(number int32) string {
	if name, ok := names[number]; ok {
		return name
	}
	return "syscall_" + strconv.Itoa(int(number))
}
