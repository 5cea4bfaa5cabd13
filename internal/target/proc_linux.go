package target

import (
	"errors"
	"syscall"
)

func isNoProcess(err error) bool { return errors.Is(err, syscall.ESRCH) }
