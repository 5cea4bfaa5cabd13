package scenarios

import "github.com/ebpfllm/ebpfllm/internal/truthlab/lab"

func servers() []lab.Scenario { return nil }
