//go:build linux

package syscalls

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestName(t *testing.T) {
	assert.Equal(t, "read", Name(syscall.SYS_READ))
	assert.Equal(t, "futex", Name(syscall.SYS_FUTEX))
	assert.Equal(t, "syscall_99999", Name(99999))
}
