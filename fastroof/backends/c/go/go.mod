module fastroof_example

go 1.19
